"""What ranks tell each other between two steps, where they meet in steps and where they do not.

A rank that evaluates, say, may do so while others are in a step: these wait in the communicator of
replicas, and it in that of ranks. So it comes to both, and all are told that they differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from allreduce.comm import Communicator, Work, begin_exchange, exchange
from allreduce.errors import (
    AllreduceError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    UsageError,
    is_interrupt,
)

# For so long all is looked at; then the wait is one that warns and gives up, and a thread looks at
# the rest, for one that comes to a step as late as that.
_LOOKED_AT_SECONDS, _LISTEN_SECONDS = 5.0, 0.1
# At first other threads and processes are let go ahead, and nothing sleeps: an exchange of ranks
# that come at once takes a tenth of that.
_AWAKE_SECONDS, _LONGEST_NAP_SECONDS = 1e-3, 2e-3
_VERDICT_SECONDS = 1.0  # in which members hear that they differ


def exchange_between_steps(
    ranks: Communicator, steps: Sequence[Communicator], purpose: str, mine: np.ndarray
) -> np.ndarray:
    """Gather an array of every rank's; a collective call of all ranks, for all their replicas.

    Args:
        ranks: Has one member per rank.
        steps: Those of this rank's replicas, if they have met in a step.
        purpose: What it is for, in words that are the same on all ranks.
        mine: Of one shape on all ranks.

    Returns:
        `(ranks, …)`.

    Raises:
        MismatchError: A rank makes another call, of its own or in a step.
    """
    if not steps:  # the first step meets among ranks
        return exchange(ranks, purpose, mine)
    everywhere, works = (ranks, *steps), list[Work]()
    try:
        for each in everywhere:
            works.append(begin_exchange(each, purpose, mine))
        if not _look_at(works):
            _listen(ranks, works)
        found, *_ = [work.wait() for work in works]
    except BaseException as error:
        cause = _cause(works) if isinstance(error, PeerLostError) else None
        for each in everywhere:  # where all is well, a call is left that the others do not make
            if not each.closed:
                reason = f"{purpose} was ended by {cause or error!r}"
                each.abort(reason, interrupted=is_interrupt(cause or error))
        if cause is not None:
            raise cause from None
        raise
    return np.asarray(found).reshape(ranks.size, *mine.shape)


def _cause(works: Sequence[Work]) -> MismatchError | TimeoutError | None:
    """Return how ranks differ, or who did not come, if an exchange says so.

    Who heard it first has ended the others, whose error is an echo of it. This looks, and waits for
    none of them: the others would take a wait that is given up here for what has ended all.
    """
    until, left = time.monotonic() + _VERDICT_SECONDS, list(works)
    while left and time.monotonic() < until:
        for work in list(left):
            try:
                if work.done():
                    left.remove(work)
            except (MismatchError, TimeoutError) as error:
                return error
            except AllreduceError:  # by which another exchange has ended
                left.remove(work)
        time.sleep(_LONGEST_NAP_SECONDS)
    return None


def _look_at(works: Sequence[Work]) -> bool:
    """Wait a while for all at once: any of them may tell that a rank differs.

    Returns:
        Whether all are done.
    """
    began, left = time.monotonic(), list(works)
    while left := [work for work in left if not work.done()]:
        waited = time.monotonic() - began
        if waited > _LOOKED_AT_SECONDS:
            return False
        time.sleep(min(waited / 8, _LONGEST_NAP_SECONDS) if waited > _AWAKE_SECONDS else 0)
    return True


def _listen(ranks: Communicator, works: Sequence[Work]) -> None:
    """Wait for the exchange of ranks, which is the first, until another tells that one differs."""
    first, *others = works
    over, told = threading.Event(), list[AllreduceError]()

    def listen() -> None:
        try:
            while not over.is_set():
                over.wait(_LISTEN_SECONDS)
                if not [work for work in others if not work.done()]:
                    break
        except UsageError:
            return  # of an MPI that other threads may not call: then nobody listens
        except AllreduceError as error:
            # Who has given up among ranks ends the others behind that.
            if not (isinstance(error, PeerLostError) and _ends(ranks)):
                told.append(error)
                ranks.abort(str(error))  # which ends the wait

    listener = threading.Thread(target=listen, name="allreduce-between-steps", daemon=True)
    listener.start()
    try:
        try:
            first.wait()
        finally:
            over.set()
            listener.join()
    except AllreduceError:
        if told:
            raise told[0] from None
        raise


def _ends(ranks: Communicator) -> bool:
    """Wait for the end of the ranks' own communicator, if it is about to come."""
    until = time.monotonic() + _VERDICT_SECONDS
    while not ranks.dead and time.monotonic() < until:
        time.sleep(_LONGEST_NAP_SECONDS)
    return ranks.dead
