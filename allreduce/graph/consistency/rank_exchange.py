"""Exchange data between ranks outside a step; detect ranks that are inside one.

Ranks inside a step wait in the communicator of replicas, and ranks outside in that of ranks. An
exchange therefore uses both communicators, so that a difference raises on all ranks.
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

# All exchanges are polled this long. Then the caller waits for the first one, which warns and times
# out, and a thread polls the others, in case a rank enters a step that late.
_POLL_SECONDS, _LISTEN_SECONDS = 5.0, 0.1
# Polling first only yields the processor, then sleeps: an exchange of ranks that arrive together
# takes a tenth of this time.
_AWAKE_SECONDS, _LONGEST_NAP_SECONDS = 1e-3, 2e-3
_VERDICT_SECONDS = 1.0  # within which members learn that they differ


def exchange_between_steps(
    ranks: Communicator, steps: Sequence[Communicator], purpose: str, mine: np.ndarray
) -> np.ndarray:
    """Gather an array from every rank; all ranks call this.

    Args:
        ranks: The communicator with one member per rank.
        steps: The communicators of this rank's replicas, if a step has used them.
        purpose: The purpose, in the same words on all ranks.
        mine: This rank's array; of one shape on all ranks.

    Returns:
        `(ranks, …)`.

    Raises:
        MismatchError: A rank makes another call, itself or in a step.
    """
    if not steps:  # the first step meets among ranks
        return exchange(ranks, purpose, mine)
    everywhere, works = (ranks, *steps), list[Work]()
    try:
        for each in everywhere:
            works.append(begin_exchange(each, purpose, mine))
        if not _poll(works):
            _listen(ranks, works)
        found, *_ = [work.wait() for work in works]
    except BaseException as error:
        cause = _cause(works) if isinstance(error, PeerLostError) else None
        for each in everywhere:  # withdraw calls that the other ranks do not make
            if not each.closed:
                reason = f"{purpose} was ended by {cause or error!r}"
                each.abort(reason, interrupted=is_interrupt(cause or error))
        if cause is not None:
            raise cause from None
        raise
    return np.asarray(found).reshape(ranks.size, *mine.shape)


def _cause(works: Sequence[Work]) -> MismatchError | TimeoutError | None:
    """Return the mismatch or timeout that ended the exchanges, if one of them reports it.

    The first rank to detect it aborts the other exchanges, whose errors only repeat it. This polls:
    a wait that is given up here would look to the other ranks like the original failure.
    """
    until, left = time.monotonic() + _VERDICT_SECONDS, list(works)
    while left and time.monotonic() < until:
        for work in list(left):
            try:
                if work.done():
                    left.remove(work)
            except (MismatchError, TimeoutError) as error:
                return error
            except AllreduceError:  # an echo of another exchange's failure
                left.remove(work)
        time.sleep(_LONGEST_NAP_SECONDS)
    return None


def _poll(works: Sequence[Work]) -> bool:
    """Poll all exchanges for a while, since any of them may report a mismatch.

    Returns:
        Whether all are done.
    """
    began, left = time.monotonic(), list(works)
    while left := [work for work in left if not work.done()]:
        waited = time.monotonic() - began
        if waited > _POLL_SECONDS:
            return False
        time.sleep(min(waited / 8, _LONGEST_NAP_SECONDS) if waited > _AWAKE_SECONDS else 0)
    return True


def _listen(ranks: Communicator, works: Sequence[Work]) -> None:
    """Wait for the exchange of ranks, the first one, while a thread polls the others."""
    first, *others = works
    over, errors = threading.Event(), list[AllreduceError]()

    def listen() -> None:
        try:
            while not over.is_set():
                over.wait(_LISTEN_SECONDS)
                if not [work for work in others if not work.done()]:
                    break
        except UsageError:
            return  # an MPI without thread support: no polling
        except AllreduceError as error:
            # A failure among ranks also ends the other exchanges.
            if not (isinstance(error, PeerLostError) and _ends(ranks)):
                errors.append(error)
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
        if errors:
            raise errors[0] from None
        raise


def _ends(ranks: Communicator) -> bool:
    """Return whether the communicator of ranks has ended, or does so soon."""
    until = time.monotonic() + _VERDICT_SECONDS
    while not ranks.dead and time.monotonic() < until:
        time.sleep(_LONGEST_NAP_SECONDS)
    return ranks.dead
