"""This process's replicas: their devices, threads and communicators, and their errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from allreduce.comm import Communicator, total
from allreduce.comm.core import lifecycle
from allreduce.comm.core.locks import owned
from allreduce.devices import logical_devices
from allreduce.devices.names import DeviceName
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    MismatchError,
    PeerLostError,
    UsageError,
    is_interrupt,
)
from allreduce.graph.consistency import trace_failure
from allreduce.graph.consistency.rank_exchange import exchange_between_steps
from allreduce.graph.core.scope import users_line
from allreduce.graph.execute.timing import BatchTiming
from allreduce.graph.placement.device_map import DeviceMap
from allreduce.graph.replicate.threads import Threads
from allreduce.graph.trace.rank_digest import RankDigest
from allreduce.graph.trace.replica import Replica

# A strategy that its user has dropped is a cycle with its variables and programs, and waits for the
# collector. That counts Python objects: of 200 such strategies on two ranks it freed none, though
# each has a file descriptor and 3 MB of shared memory. So garbage is collected as soon as this many
# have communicators.
_DROPPED = 8


T = TypeVar("T")

# The steps that the caller is a part of: its thread's, or, in a thread that helps, the asker's.
_steps: ContextVar[tuple[object, ...]] = ContextVar("steps", default=())


class Replicas:
    """The replicas of this process, which run one step at a time.

    Attributes:
        devices: The device of each replica; the first one if it owns several.
        owned: All devices of each replica; empty if replicas may use all devices of the process.
        first_replica: The id of the first local replica among all replicas.
        num_replicas_in_sync: The number of replicas over all ranks.
        generation: The generation of their world.
        task_index: This process's number among those that share no communicator.
        make_table: Makes a table of an Embedding that other processes hold; None if none do.
        deals_rows: Whether processes ask for the rows of `fit`, as parameter servers' workers do.
        rank_digest: The digest of this process's batches and assigned values.
        fed: The timing of the latest batch that no step has used yet.
    """

    generation = 0
    task_index = 0
    deals_rows = False
    make_table: Callable[..., Any] | None = None

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
        self._threads: Threads | None = None
        self._closing: weakref.finalize[Any, Any] | None = None
        # No properties, nor the calls that can be spared in `on_replicas`: each step asks.
        self.local_replicas = len(self.devices)
        self._spans_ranks = self.local_replicas < total
        self.rank_digest = RankDigest()
        self._running = threading.RLock()  # buffers belong to one step at a time
        self._step: object = None  # the one that runs
        self._stale = False  # whether a dead communicator must still be replaced
        self.fed: BatchTiming | None = None
        self._over = ""  # why they run no steps any more

    @property
    def places(self) -> list[DeviceMap]:
        """The map from device names to devices, for each local replica."""
        all_devices = [device.name for device in logical_devices()]
        owned = self.owned or [dict.fromkeys((home, *all_devices)) for home in self.devices]
        return [DeviceMap.of(list(own), all_devices) for own in owned]

    @property
    def communicator(self) -> Communicator | None:
        """The communicator with one member per process; None for a single process."""
        return None

    def replica_communicators(self) -> list[Communicator]:
        """Make the communicators of this process's replicas, with one member per replica."""
        raise UsageError("a single replica has no peer to communicate with")

    def sum_over_ranks(self, what: str, array: np.ndarray) -> np.ndarray:
        """Sum an array over all ranks; `what` describes it."""
        return array if self.communicator is None else total(self.communicator, what, array)

    @property
    def replicas(self) -> list[Replica]:
        """This process's replicas; their communicators are made when first needed."""
        with self._making:  # replicas' threads may ask at the same time
            if self._replicas is None:
                several = self.num_replicas_in_sync > 1
                members = self._communicators() if several else [None]
                ids = range(self.first_replica, self.first_replica + self.local_replicas)
                each = zip(ids, members, self.places, strict=True)
                self._replicas = [
                    Replica(index, id, member, places, self.generation, self.rank_digest)
                    for index, (id, member, places) in enumerate(each)
                ]
            return self._replicas

    def _communicators(self) -> list[Communicator]:
        """Make the replicas' communicators, which are closed when this object is freed."""
        _collect_dropped()
        members = self.replica_communicators()
        self._closing = weakref.finalize(self, _leave, members)
        self._closing.atexit = False  # transports then leave without help
        _communicating.add(self)
        return members

    def _close_communicators(self) -> None:
        """Close the communicators of `replicas`; may be repeated after an interrupt."""
        made = [each.communicator for each in self._replicas or () if each.communicator is not None]
        lifecycle.drain_devices([each._dispatch.transport for each in made])
        for each in made:
            each.close()
        if self._closing is not None:
            self._closing.detach()
        _communicating.discard(self)
        self._replicas = None

    def _first(self) -> Replica:
        """Return this process's first replica, as a world of one."""
        return Replica(0, self.first_replica, None, self.places[0])

    def on_replicas(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(index)` for all local replicas, each in its own thread if there are several.

        If one raises, the collectives of all other replicas, on all ranks, are aborted, unless they
        raise the same error; the first error is raised.
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

        if self._threads is None:
            self._threads = Threads(self.local_replicas)
        results = self._threads.do(guarded)
        if failures:
            # Errors of the others, whose communicators were aborted, only repeat the cause.
            error = next((e for e in failures if not isinstance(e, PeerLostError)), failures[0])
            try:
                self._add_traceback(error)
                raise error
            finally:
                failures.clear()  # whose tracebacks hold this frame and its objects
                del error
        return results

    def _tell(self, index: int, error: BaseException) -> None:
        """Let the replicas that wait for this one know that it does not come."""
        member = self._replicas[index].communicator if self._replicas else None
        if member is not None and not getattr(error, "everywhere", False):
            who = self._called(index)
            try:
                echoes = isinstance(error, AllreduceError) and member.dead
                if self._spans_ranks and not echoes:
                    trace_failure.publish_traceback(member, who, error)  # before they read it
            finally:
                member.abort(trace_failure.reason(who, error), interrupted=is_interrupt(error))

    def _called(self, index: int) -> str:
        return f"replica {self.first_replica + index}"

    def _add_traceback(self, error: BaseException) -> None:
        member = self._replicas[0].communicator if self._replicas else None
        if member is None or not self._spans_ranks:
            return
        if isinstance(error, PeerLostError | MismatchError):
            trace_failure.attach_traceback(member, error)

    def _refuse(self, error: Exception) -> bool:
        """End a step that this rank alone cannot make, on the others too.

        Returns:
            Whether all ranks have failed alike, and can go on.
        """
        if not self._spans_ranks or getattr(error, "everywhere", False):
            return self._spans_ranks
        made = [each.communicator for each in self._replicas or ()] or [self.communicator]
        members = [each for each in made if each is not None and not (each.dead or each.closed)]
        if not members or len(members) < len(made):  # an error of theirs has ended all of it
            return False
        trace_failure.publish_traceback(members[0], self._called(0), error)  # before they read it
        alike = trace_failure.all_alike(members, error)
        if not alike:
            for index, member in enumerate(members):
                member.abort(trace_failure.reason(self._called(index), error))
        return alike

    def _exclusively(self, work: Callable[[], T]) -> T:
        """Call `work`, which has the replicas to itself; repair them after an error.

        Each step does this, so it makes as few Python calls as possible. It is no context
        manager: these are Python, and a signal's handler that raises as one is left would have it
        hold the lock for as long as the traceback lives.
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
                    self._stop(KeyboardInterrupt())  # which another one may have kept from it
                if not self._spans_ranks:
                    self._renew()
                if self._over:
                    self.check_not_over()
                return work()
            except BaseException as error:
                self._stop(error)
                self._note_end(error)
                raise
            finally:
                self._step = None
                _steps.set(outer)

    def exchange(self, purpose: str, mine: np.ndarray) -> np.ndarray:
        """Gather an array from every rank between two steps; all ranks call this.

        Args:
            purpose: The purpose, in the same words on all ranks.
            mine: This rank's array; of one shape on all ranks.

        Returns:
            `(ranks, …)`.

        Raises:
            MismatchError: A rank makes another call, or is inside a step.
            ClosedError: The replicas cannot run steps any more.
        """
        ranks = self.communicator
        if ranks is None:
            return mine[None]

        def meet() -> np.ndarray:
            members = [each.communicator for each in self._replicas or ()]
            steps = [each for each in members if each is not None]
            return exchange_between_steps(ranks, steps, purpose, mine)

        return self._exclusively(meet)

    def _stop(self, cause: BaseException) -> None:
        """Stop all replicas after a signal handler has raised."""
        if self._threads is None or not self._threads.busy:
            return
        for replica in self._replicas or ():
            assert replica.communicator is not None, "a single replica has no threads"
            reason = f"its step was ended by {cause!r}"
            replica.communicator.abort(reason, interrupted=is_interrupt(cause))
        self._threads.end()
        self._threads = None

    def _renew(self) -> None:
        """Make replicas usable again after one has raised, if all of them live in this process.

        The error has ended their communicator, and memory of a dead one is never used again. An
        interrupted repair is repeated.
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
        """Keep the error of replicas of several ranks: their communicator is not replaced."""
        if self._spans_ranks and self._dead:
            message, more, _ = str(error).partition("\n")
            if more:  # which begins a list
                message = message.rpartition("; ")[0] or message
            why = f": {message}" if message else ""  # an interrupt says nothing
            self._over = self._over or f"{type(error).__name__} has ended a step of it{why}"

    @property
    def is_over(self) -> bool:
        """Whether an error or `close` has ended the replicas."""
        return bool(self._over)

    def check_not_over(self) -> None:
        """Raise an error if an error or `close` has ended the replicas."""
        if self._over:
            raise ClosedError(
                f"{users_line()}: {self!r} runs no steps any more, as {self._over}. Its variables "
                "can still be read and saved; to go on, make another strategy, on every rank, and "
                "in its scope the model, or load it there (if a rank is gone, start the job again)"
            )

    def _forget(self) -> None:
        """Let go of all memory of a dead communicator."""

    def close(self) -> None:
        """End the replicas' threads and communicators; no more steps can run."""
        self._over = "it was closed"
        if self._threads is not None:
            self._threads.end()
            self._threads = None
        self._close_communicators()


_communicating: weakref.WeakSet[Replicas] = weakref.WeakSet()
_collect_at = _DROPPED


def _collect_dropped() -> None:
    """Collect garbage if so many strategies have communicators that some may be garbage."""
    global _collect_at
    if len(_communicating) >= _collect_at:
        gc.collect()
        _collect_at = max(_DROPPED, 2 * len(_communicating))  # communicators in use stay


def _leave(members: Sequence[Communicator]) -> None:
    """Close without waiting for calls: the collector runs this also where locks are held.

    Steps have returned before their collectives on GPUs were finished: only these are awaited.
    """
    try:
        lifecycle.drain_devices([member._dispatch.transport for member in members])
    finally:
        for member in members:
            member._close(drain=False)
