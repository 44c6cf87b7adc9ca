"""The replicas of this process: where they are, their threads, and what an error leaves of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from allreduce.comm import Communicator, total
from allreduce.comm.locks import owned
from allreduce.devices import logical_devices
from allreduce.devices.names import DeviceName
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    MismatchError,
    PeerLostError,
    UsageError,
)
from allreduce.graph import tracebacks, unmade
from allreduce.graph.places import Places
from allreduce.graph.replica import Replica
from allreduce.graph.reports import Fed
from allreduce.graph.scope import users_line
from allreduce.graph.threads import Threads

T = TypeVar("T")

# The steps that the caller is a part of: its thread's, or, in a thread that helps, the asker's.
_steps: ContextVar[tuple[object, ...]] = ContextVar("steps", default=())


def current_steps() -> tuple[object, ...]:
    """Give the steps that the caller is a part of, outermost first."""
    return _steps.get()


class Replicas:
    """The replicas that this process has of a program, for one step at a time.

    Attributes:
        devices: This process's replicas' devices, in order; of several that one owns, the first.
        owned: All devices of each; empty where a replica may use what the process has.
        first_replica: The id of the first of them among all replicas.
        num_replicas_in_sync: How many replicas there are, over all ranks.
        generation: Of the world they are in.
        fed: How long the batch took that was made last and that no step has had yet.
    """

    generation = 0

    def __init__(
        self,
        devices: Sequence[DeviceName],
        first_replica: int,
        total: int,
        owned: Sequence[Sequence[DeviceName]],
    ) -> None:
        self.devices = tuple(devices)
        self.owned = tuple(map(tuple, owned))
        self.first_replica = first_replica
        self.num_replicas_in_sync = total
        self._replicas: list[Replica] | None = None
        self._making = threading.Lock()
        self._running = threading.RLock()  # buffers belong to one step at a time
        self._step: object = None  # the one that runs
        self._threads: Threads | None = None
        self._stale = False  # whether what a dead communicator leaves has still to be made anew
        self.fed: Fed | None = None
        self._over = ""  # why they run no steps any more
        # No properties, nor the calls that can be spared in `_exclusively` and `on_replicas`: each
        # step asks.
        self.local_replicas = len(self.devices)
        self._spans_ranks = self.local_replicas < total

    @property
    def places(self) -> list[Places]:
        """What the device names in each local replica's program mean."""
        everyones = [device.name for device in logical_devices()]
        owned = self.owned or [dict.fromkeys((home, *everyones)) for home in self.devices]
        return [Places.of(list(own), everyones) for own in owned]

    @property
    def communicator(self) -> Communicator | None:
        """The communicator with one member per process; None where there is only this process."""
        return None

    def replica_communicators(self) -> list[Communicator]:
        """Make the communicators of this process's replicas, of one member per replica."""
        raise UsageError("a single replica has nobody to communicate with")

    def sum_over_ranks(self, what: str, array: np.ndarray) -> np.ndarray:
        """Add up an array of every rank's; `what` says which."""
        return array if self.communicator is None else total(self.communicator, what, array)

    @property
    def replicas(self) -> list[Replica]:
        """This process's replicas; their communicators are made when first needed."""
        with self._making:  # replicas' threads may ask at the same time
            if self._replicas is None:
                several = self.num_replicas_in_sync > 1
                members = self.replica_communicators() if several else [None]
                ids = range(self.first_replica, self.first_replica + self.local_replicas)
                each = zip(ids, members, self.places, strict=True)
                self._replicas = [
                    Replica(index, id, member, places, self.generation)
                    for index, (id, member, places) in enumerate(each)
                ]
            return self._replicas

    def _first(self) -> Replica:
        """Return this process's first replica as one that has nobody beside it."""
        return Replica(0, self.first_replica, None, self.places[0])

    def on_replicas(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(index)` for all local replicas at once, each in its own thread if several.

        If one raises, all others, of other ranks too, are released from their collectives, unless
        they raise it as well; the first error is raised.
        """
        if self.local_replicas == 1:
            try:
                return [work(0)]
            except BaseException as only:
                self._tell(0, only)
                self._add_traceback(only)
                raise
        failures: list[BaseException] = []
        guard = threading.Lock()

        def guarded(index: int) -> Any:
            try:
                return work(index)
            except BaseException as error:
                with guard:
                    failures.append(error)
                self._tell(index, error)
                return None

        results = self._in_threads(guarded)
        if failures:
            # What the others raise because theirs was aborted only echoes the cause.
            error = next((e for e in failures if not isinstance(e, PeerLostError)), failures[0])
            try:
                self._add_traceback(error)
                raise error
            finally:
                failures.clear()  # whose tracebacks hold this frame, and what it knows
                del error
        return results

    def _in_threads(self, work: Callable[[int], Any]) -> list[Any]:
        if self._threads is None:
            self._threads = Threads(self.local_replicas)
        return self._threads.do(work)

    def _tell(self, index: int, error: BaseException) -> None:
        """Let the replicas that wait for this one know that it does not come."""
        member = self._replicas[index].communicator if self._replicas else None
        if member is not None and not getattr(error, "everywhere", False):
            who = self._called(index)
            try:
                echoes = isinstance(error, AllreduceError) and member.dead
                if self._spans_ranks and not echoes:
                    tracebacks.tell(member, who, error)  # before the others look for it
            finally:
                member.abort(tracebacks.reason(who, error))

    def _called(self, index: int) -> str:
        return f"replica {self.first_replica + index}"

    def _add_traceback(self, error: BaseException) -> None:
        member = self._replicas[0].communicator if self._replicas else None
        if member is None or not self._spans_ranks:
            return
        if isinstance(error, PeerLostError | MismatchError):
            tracebacks.add(member, error)

    def _refuse(self, error: Exception) -> None:
        """End a step that this rank alone cannot make, on the others too.

        Where all ranks fail alike, they can go on.
        """
        if not self._spans_ranks or getattr(error, "everywhere", False):
            return
        made = [each.communicator for each in self._replicas or ()] or [self.communicator]
        members = [each for each in made if each is not None and not (each.dead or each.closed)]
        if not members or len(members) < len(made):  # an error of theirs has ended all of it
            return
        if self._replicas:
            tracebacks.tell(members[0], self._called(0), error)  # before the others look for it
        if not unmade.all_alike(members, error):
            for index, member in enumerate(members):
                member.abort(tracebacks.reason(self._called(index), error))

    def _exclusively(self, work: Callable[[], T]) -> T:
        """Call `work`, which alone uses the replicas; what an error has left is made good.

        It is no context manager: these are Python, and a signal's handler that raises as one is
        left would have it hold the lock for as long as the traceback lives.

        Raises:
            UsageError: The caller is in the middle of a step of these replicas.
            ClosedError: They are closed, or an error has ended their communicator for good.
        """
        outer = _steps.get()
        if owned(self._running) or self._step in outer:
            raise UsageError(
                f"{users_line()}: a step of {self!r} was called in the middle of another one, by a "
                "signal's handler or an operation's kernel; call it when that one is over"
            )
        with self._running:
            step = self._step = object()
            try:
                _steps.set((*outer, step))
                if self._threads is not None:
                    self._stop("an interrupt")  # which another one may have kept from it
                if not self._spans_ranks:
                    self._renew()
                if self._over:
                    self.check_not_over()
                return work()
            except BaseException as error:
                self._stop(repr(error))
                self._note_end(error)
                raise
            finally:
                self._step = None
                _steps.set(outer)

    def _stop(self, cause: str) -> None:
        """See to it that no replica goes on by itself after a signal's handler has raised."""
        if self._threads is None or not self._threads.busy:
            return
        for replica in self._replicas or ():
            assert replica.communicator is not None, "a single replica has no threads"
            replica.communicator.abort(f"its step was ended by {cause}")
        self._threads.end()
        self._threads = None

    def _renew(self) -> None:
        """Make replicas usable again after one has raised, if all of them live in this process.

        The error has killed their communicator, and memory of a dead one is not used again. What is
        interrupted is done again.
        """
        if self._spans_ranks:
            return
        self._stale |= self._dead
        if self._stale:
            self._close_communicators()
            self._forget()
            self._stale = False

    @property
    def _dead(self) -> bool:
        members = [each.communicator for each in self._replicas or ()]
        return any(member is not None and member.dead for member in members)

    def _note_end(self, error: BaseException) -> None:
        """Keep what has ended replicas of several ranks, whose communicator is not made anew."""
        if self._spans_ranks and self._dead:
            said, more, _ = str(error).partition("\n")
            if more:  # which begins a list
                said = said.rpartition("; ")[0] or said
            self._over = self._over or f"{type(error).__name__} has ended a step of it: {said}"

    def check_not_over(self) -> None:
        """Refuse to go on where an error, or `close`, has ended them."""
        if self._over:
            raise ClosedError(
                f"{users_line()}: {self!r} runs no steps any more, as {self._over}. Its variables "
                "can still be read and saved; to go on, make another strategy, on every rank, and "
                "in its scope the model, or load it there (if a rank is gone, start the job again)"
            )

    def _forget(self) -> None:
        """Let go of all memory of a dead communicator."""

    def close(self) -> None:
        """End the replicas' threads and communicators; they run no more steps."""
        self._over = "it was closed"
        if self._threads is not None:
            self._threads.end()
            self._threads = None
        self._close_communicators()

    def _close_communicators(self) -> None:
        for replica in self._replicas or ():
            if replica.communicator is not None:
                replica.communicator.close()
        self._replicas = None
