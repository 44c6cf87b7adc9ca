"""Let the members of a new group meet before they make it; name the ranks that do not come.

Each member arrives under a key of the group in the store. The first member waits for all others and
then publishes that all have come, so that the others ask once. A member that gives up publishes
that under the same key, and all members of this attempt raise. A member that comes after that goes
on to the next attempt, so that all count attempts alike.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from allreduce.cluster import SilentError, World
from allreduce.cluster.host.waiting import Wait
from allreduce.comm.core import progress
from allreduce.comm.failures.reporter import advice
from allreduce.errors import AllreduceError, ClosedError, MismatchError, PeerLostError, TimeoutError

_POLL_SECONDS = 0.5  # between two looks at the arrivals; and for the store to answer
_CAUSE_SECONDS = 0.2  # for which it is looked for why a process is gone
_PREFIX = "rendezvous/"  # of all keys
_ALL = "all"  # the key that says that all have come, or why they cannot
_REMEDY = "all of these ranks have to make it, in this order, after the same groups before it"
_ERRORS: dict[str, type[AllreduceError]] = {
    kind.__name__: kind for kind in (MismatchError, PeerLostError, TimeoutError)
}


class Rendezvous:
    """One attempt of one member to meet the others.

    Args:
        where: "[shared] rank 2", for messages.
        ranks: The members, by their ranks in the parent.
        call: The call that makes the group: "group([0, 1]) at train.py:31".
        transport: The name of the group's transport, if the member gives one.
        check_alive: Raises the parent's error if it has ended.
    """

    def __init__(
        self,
        where: str,
        parent: World,
        group: World,
        ranks: Sequence[int],
        call: str,
        transport: str | None,
        check_alive: Callable[[], None],
    ) -> None:
        self._where, self._parent, self._group, self._ranks = where, parent, group, ranks
        self._call, self._transport, self._check_alive = call, transport, check_alive
        self._me = parent.called()

    def meet(self, timeout: float) -> bool:
        """Wait until all members have called this.

        Returns:
            Whether they have; if not, one gave up before this member came.

        Raises:
            MismatchError: Members name different transports.
            TimeoutError: A member did not come.
            PeerLostError: A process died, or a member was interrupted here.
        """
        if self._group.size == 1:
            return True
        wait = Wait(timeout)
        try:
            if self._is_given_up():
                return False
            self._set(str(self._group.rank), self._transport)
            if self._group.rank == 0:
                self._collect(wait)
            while not self._have_all_come(min(_POLL_SECONDS, wait.quiet)):
                self._check_and_progress(wait)
            return True
        except PeerLostError as lost:
            self._raise_cause(lost)
        except AllreduceError:  # the others learn of it as this member did
            raise
        except BaseException as error:  # a signal's handler raised
            self._fail("PeerLostError", f"left {self._call} by {type(error).__name__}")
            raise
        finally:
            members = [member.world_rank for member in self._group.members]
            self._group.store.delete_prefix(_PREFIX, members)  # once all have left

    def _raise_cause(self, lost: PeerLostError) -> NoReturn:
        """Raise the reason that an ended process gave to the members, or `lost`."""
        until = time.monotonic() + _CAUSE_SECONDS
        with contextlib.suppress(ClosedError):
            while time.monotonic() < until:
                self._check_alive()
                time.sleep(_CAUSE_SECONDS / 20)
        raise lost

    def _is_given_up(self) -> bool:
        answer = self._get(_ALL)
        failure = None if answer is None else json.loads(answer)
        return failure is not None and failure[0] == "TimeoutError"

    def _collect(self, wait: Wait) -> None:
        """Wait for the other members, and say that all have come."""
        for rank in range(1, self._group.size):
            while (answer := self._get(str(rank), min(_POLL_SECONDS, wait.quiet))) is None:
                self._check_and_progress(wait)
            other = json.loads(answer)
            if other != self._transport:
                raise self._fail("MismatchError", self._differs(rank, other))
        if not self._have_all_come(0):
            self._set(_ALL, None)

    def _have_all_come(self, timeout: float) -> bool:
        """Return whether all have come; raise if this attempt has failed."""
        answer = self._get(_ALL, timeout)
        if answer is None:
            return False
        failure = json.loads(answer)
        if failure is not None:
            raise self._error(*failure)
        return True

    def _check_and_progress(self, wait: Wait) -> None:
        """Raise if there is nothing to wait for any more, and go on with other calls."""
        self._have_all_come(0)
        self._check_alive()
        progress.make_progress()  # what only this thread may, as of some MPIs
        if not wait.quiet:
            absent = self._absent()
            if not wait.has_time_left(f"{absent} in {self._call}; {_REMEDY}"):
                reason = f"gave up {self._call} after {wait.timeout:g} s: {absent}"
                reason = f"{reason} did not come; {_REMEDY}; {advice(absent)}"
                raise self._fail("TimeoutError", reason)

    def _absent(self) -> str:
        """Name the members that have not arrived; if all have, the first, which has to say so."""
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        missing = [rank for rank in others if self._get(str(rank)) is None]
        return ", ".join(map(self._named, missing or [0]))

    def _named(self, rank: int) -> str:
        """Name a member, and say whether its process lives if this host knows that."""
        number = self._ranks[rank]
        return f"{self._parent.called(number)} ({self._parent.state(number)})"

    def _differs(self, rank: int, transport: str | None) -> str:
        return (
            f"makes {self._call} with transport={self._transport!r}, but "
            f"{self._parent.called(self._ranks[rank])} with transport={transport!r}; name the same "
            "on all of them"
        )

    def _fail(self, kind: str, reason: str) -> AllreduceError:
        """Tell the other members why this attempt has failed, and return it as an error."""
        self._set(_ALL, [kind, f"{self._me} {reason}"])
        with contextlib.suppress(AllreduceError):  # raised below in any case
            self._get(_ALL)  # so that it is stored before this process may end
        return self._error(kind, reason)

    def _error(self, kind: str, reason: str) -> AllreduceError:
        return _ERRORS[kind](f"{self._where}: {reason}")

    def _set(self, key: str, value: str | list[str] | None) -> None:
        self._group.store.post(_PREFIX + key, json.dumps(value).encode())

    def _get(self, key: str, timeout: float = 0.0) -> bytes | None:
        """Return a member's value; None if it has set none or the store does not answer."""
        with contextlib.suppress(SilentError):
            return self._group.store.try_get(_PREFIX + key, _POLL_SECONDS, timeout)
        return None
