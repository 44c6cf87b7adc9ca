"""How the members of a new group meet: who waits in another group, or does not come, is told.

They meet in the store of the larger communicator's world. Each arrives under a key of the group;
where not all come at once, it writes down which group it waits in. Members of which each waits for
the next, and the last for the first, would wait for ever: all of them raise, and so do those who
wait for one of them. A member that raises leaves its failure where it was expected, and one that
closes the communicator, or ends, a note of that. What failed stays so for all of its members,
whoever goes on: who tries again arrives under the key of the next attempt.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from allreduce.cluster import LeaderLeftError, SilentError, World
from allreduce.cluster.machine import process_state
from allreduce.cluster.waiting import Wait
from allreduce.comm import engine
from allreduce.comm import gathering_failures as failures
from allreduce.comm.gathering_notes import Failure, Note, Wanted
from allreduce.comm.sites import place, text
from allreduce.errors import AllreduceError, ClosedError, PeerLostError

_PATIENCE_SECONDS = 0.25  # then it is looked at what the absent ones do
_LOOK_SECONDS = 0.5  # between later looks; and for the store to answer, whose keeper may be busy
_CAUSE_SECONDS = 0.2  # for which it is looked for why a process is gone


class _Failed(Exception):  # noqa: N818 - tells what to raise, and never leaves this file
    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Gathering:
    """Where one member of a communicator meets the others before they make groups.

    Args:
        world: The communicator's processes, in the order of its members.
        name: Its name.
        timeout: Seconds in which the members of a group must have come.
        check_alive: Raises what has ended the communicator, if it has ended.
    """

    def __init__(
        self, world: World, name: str, timeout: float, check_alive: Callable[[], None]
    ) -> None:
        self._check_alive = check_alive
        self._world, self._timeout, self._me = world, timeout, world.rank
        self._room = f"{world.generation}/gathering/{name}"
        self._waits = f"waits/{self._me}"  # where this member's note is
        self._turns = count(1)
        self._attempts: dict[str, int] = {}  # by group, at those that have failed: the next one
        self._told: set[tuple[int, int]] = set()  # turns of failures that were raised here
        self._failed: Failure | None = None  # what this member's note tells
        self._left = False
        self._lock = threading.Lock()
        self._inside = 0  # threads: where several wait, no note could say for whom

    def meet(
        self, where: str, kind: str, number: int, ranks: Sequence[int], transport: str | None
    ) -> None:
        """Return when all of a group's members have called this.

        Args:
            where: "[shared] rank 2", for messages.
            kind: "group", "local" or "across".
            number: How many such groups of these ranks there are with this one.
            ranks: The members.
            transport: What is to carry their calls, if they say it.

        Raises:
            MismatchError: Members wait for each other to make different groups, or name different
                transports.
            TimeoutError: A member did not come.
            PeerLostError: A process died, or has left the larger communicator.
        """
        if len(ranks) == 1:
            return
        site = text(*place())
        wanted = Wanted(kind, number, tuple(ranks), transport, site, next(self._turns))
        with self._lock:
            self._inside += 1
            if self._inside > 1 or self._failed:
                self._note(Note())
                self._failed = None
        wait = Wait(self._timeout)
        try:
            wanted = wanted._replace(attempt=self._attempts.get(wanted.group, 1))
            while not self._come(wanted, wait):
                wanted = wanted._replace(attempt=wanted.attempt + 1)
            self._forget(wanted)
        except _Failed as failed:
            self._leave(wanted, failed.failure)
            raise failures.error(where, failed.failure, self._world.called()) from None
        except PeerLostError as error:  # of the store: that a process is gone
            raise self._cause(where, wanted, error) from None
        except AllreduceError:
            raise
        except BaseException as error:  # a signal's handler raised
            self._leave(wanted, failures.interrupted(self._world, wanted, error))
            raise
        finally:
            with self._lock:
                self._inside -= 1

    def leave(self) -> None:
        """Tell those who still make groups that this member comes to none any more."""
        with self._lock:
            left, self._left = self._left, True
        if not left and self._world.size > 1:
            self._note(Note(failure=self._failed, gone=True))

    def _come(self, wanted: Wanted, wait: Wait) -> bool:
        """Say whether all come to this attempt, or it has failed by what was raised here before."""
        if self._has_failed(wanted):
            return False
        self._set(f"{wanted.key}/{self._me}", Note(wanted))
        return self._together(wanted) or self._wait(wanted, wait)

    def _has_failed(self, wanted: Wanted) -> bool:
        """Say whether an attempt has failed; raise it unless this member has."""
        failure = self._failure(wanted)
        self._raise_new(Note(failure=failure))
        return failure is not None

    def _failure(self, wanted: Wanted) -> Failure | None:
        note = self._get(f"{wanted.key}/all")
        return None if note is None else note.failure

    def _together(self, wanted: Wanted) -> bool:
        """Say whether all come at once: the first asks for each, the others for its word."""
        wait = Wait(min(_PATIENCE_SECONDS, self._timeout))
        first, *others = wanted.ranks
        if first != self._me:
            note = self._get(f"{wanted.key}/all", wait.remaining)
            self._raise_new(note)
            return note is not None and note.failure is None
        if not all(self._joins(wanted, rank, wait.remaining) for rank in others):
            return False
        self._set(f"{wanted.key}/all", Note())
        return True

    def _wait(self, wanted: Wanted, wait: Wait) -> bool:
        """Return when all have come, or the attempt has failed; say whether they have."""
        with self._lock:
            noted = self._inside == 1
            if noted:
                self._note(Note(wanted))
        missing = [rank for rank in wanted.ranks if rank != self._me]
        while missing := [rank for rank in missing if not self._joins(wanted, rank)]:
            if self._has_failed(wanted):
                return False
            self._look(wanted, missing)
            engine.go_on()  # what only this thread may, as of some MPIs
            absent = ", ".join(self._absent(rank) for rank in missing)
            if not wait.quiet and not wait.goes_on(f"{absent} in {wanted}; {failures.COME}"):
                raise _Failed(failures.too_late(self._world, wanted, absent, self._timeout))
            self._get(f"{wanted.key}/{missing[0]}", min(_LOOK_SECONDS, wait.quiet))
        with self._lock:
            if noted and not self._left:
                self._note(Note())
        return True

    def _forget(self, wanted: Wanted) -> None:
        """Have the members' arrivals, and failed attempts, removed when all of them have met.

        Whoever looks for circles may then miss them, and finds this member's note gone.
        """
        ranks = [self._world.members[rank].world_rank for rank in wanted.ranks]
        self._attempts.pop(wanted.group, None)
        self._world.store.forget(f"{self._room}/{wanted.group}/", ranks)

    def _look(self, wanted: Wanted, missing: Sequence[int]) -> None:
        """Raise if absent members cannot come any more."""
        from allreduce.comm import gathering_circles as circles  # which few programs use

        self._check_alive()
        for rank in missing:
            note = self._get(f"waits/{rank}")
            self._raise_new(note)
            if note is not None and note.gone:
                self._check_deaths()
                raise _Failed(failures.has_left(self._world, rank, wanted))
        circle = None
        with contextlib.suppress(SilentError):  # then nobody knows who has come
            circle = circles.find(self, self._me, wanted, missing)
        if circle:
            raise _Failed(failures.in_circle(self._world, circle))

    def _check_deaths(self) -> None:
        """Raise if a process has died, for which another may have left."""
        with contextlib.suppress(LeaderLeftError):
            self._world.check_lives(_CAUSE_SECONDS)
        self._check_alive()

    def wanted_by(self, rank: int) -> Wanted | None:
        """Return what another member waits for, if its note tells it."""
        note = self._read(f"waits/{rank}")
        return None if note is None else note.wanted

    def is_over(self, wanted: Wanted) -> bool:
        """Say whether an attempt has failed."""
        note = self._read(f"{wanted.key}/all")
        return note is not None and note.failure is not None

    def has_come(self, wanted: Wanted, rank: int) -> bool:
        """Say whether a member has arrived at an attempt."""
        note = self._read(f"{wanted.key}/{rank}")
        self._raise_new(note)
        return note is not None and note.wanted is not None

    def _joins(self, wanted: Wanted, rank: int, timeout: float = 0.0) -> bool:
        """Say whether another member of this one's group has come, and wants the same."""
        other = self._arrived(wanted, rank, timeout)
        if other is None:
            return False
        if other.transport != wanted.transport:
            both = {self._me: wanted, rank: other}
            raise _Failed(failures.other_transports(self._world, both))
        return True

    def _arrived(self, wanted: Wanted, rank: int, timeout: float) -> Wanted | None:
        """Return what a member of a group says it has come for, once it has."""
        note = self._get(f"{wanted.key}/{rank}", timeout)
        self._raise_new(note)
        return None if note is None else note.wanted

    def _raise_new(self, note: Note | None) -> None:
        """Raise another member's failure, unless this one has.

        Members may find different circles at once. What has a wait in common with a failure that
        was raised here is of the same time, though its note may lie there until its member comes
        to the next group.
        """
        failure = None if note is None else note.failure
        if failure is not None and self._is_new(failure):
            raise _Failed(failure)

    def _is_new(self, failure: Failure) -> bool:
        return self._told.isdisjoint(failure.turns)

    def _leave(self, wanted: Wanted, failure: Failure) -> None:
        """Leave the failure for those who wait for this member, or come later."""
        self._told.update(failure.turns)
        self._failed = failure
        self._attempts[wanted.group] = wanted.attempt + 1
        for key in {f"{wanted.key}/{self._me}", f"{wanted.key}/all", *failure.keys}:
            self._set(key, Note(failure=failure))
        self._note(Note(failure=failure))
        with contextlib.suppress(AllreduceError):  # the failure is raised, whoever hears of it
            self._get(self._waits)  # this process may be about to end

    def _cause(self, where: str, wanted: Wanted, lost: PeerLostError) -> AllreduceError:
        """Find out why a process is gone: it may have raised, or have said why it ends."""
        with contextlib.suppress(AllreduceError):
            for rank in wanted.ranks:
                note = self._get(f"waits/{rank}") if rank != self._me else None
                if note is not None and note.failure is not None and self._is_new(note.failure):
                    return failures.error(where, note.failure, self._world.called())
        cause = lost
        until = time.monotonic() + _CAUSE_SECONDS
        with contextlib.suppress(ClosedError):
            while cause is lost and time.monotonic() < until:
                time.sleep(_CAUSE_SECONDS / 20)
                try:
                    self._check_alive()
                except PeerLostError as error:
                    cause = error
        story = str(cause).partition(": ")[2]
        found = PeerLostError(f"{where}: {wanted} cannot be made: {story}")
        found.interrupted = cause.interrupted
        return found

    def _absent(self, rank: int) -> str:
        """Name a member, and say whether its process lives if this host knows that."""
        member = self._world.members[rank]
        if member.machine != self._world.members[self._me].machine:
            return failures.member(self._world, rank)
        return f"{self._world.called(rank)} ({process_state(member.pid)})"

    def _note(self, note: Note) -> None:
        self._set(self._waits, note)

    def _set(self, key: str, note: Note) -> None:
        self._world.store.tell(f"{self._room}/{key}", note.pack())

    def _get(self, key: str, timeout: float = 0.0) -> Note | None:
        """Return a note, if somebody has left it and who keeps the store says so in time."""
        with contextlib.suppress(SilentError):
            return self._read(key, timeout)
        return None

    def _read(self, key: str, timeout: float = 0.0) -> Note | None:
        found = self._world.store.look(f"{self._room}/{key}", _LOOK_SECONDS, timeout)
        return None if found is None else Note.unpack(found)
