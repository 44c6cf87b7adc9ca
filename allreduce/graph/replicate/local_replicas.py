"""This process's replicas: their devices, threads and communicators, and their errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.comm import Communicator, total
from allreduce.devices import logical_devices
from allreduce.devices.names import DeviceName
from allreduce.errors import AllreduceError, MismatchError, PeerLostError, UsageError, is_interrupt
from allreduce.graph.consistency import trace_failure
from allreduce.graph.placement.device_map import Places
from allreduce.graph.replicate.threads import Threads
from allreduce.graph.trace.rank_digest import RankDigest
from allreduce.graph.trace.replica import Replica

# A strategy that its user has dropped is a cycle with its variables and programs, and waits for the
# collector. That counts Python objects: of 200 such strategies on two ranks it freed none, though
# each has a file descriptor and 3 MB of shared memory. So garbage is collected as soon as this many
# have communicators.
_DROPPED = 8


class LocalReplicas:
    """The replicas of this process.

    Attributes:
        devices: The device of each replica; the first one if it owns several.
        owned: All devices of each replica; empty if replicas may use all devices of the process.
        first_replica: The id of the first local replica among all replicas.
        num_replicas_in_sync: The number of replicas over all ranks.
        generation: The generation of their world.
        rank_digest: The digest of this process's batches and assigned values.
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
        self._threads: Threads | None = None
        self._closing: weakref.finalize[Any, Any] | None = None
        # No properties, nor the calls that can be spared in `on_replicas`: each step asks.
        self.local_replicas = len(self.devices)
        self._spans_ranks = self.local_replicas < total
        self.rank_digest = RankDigest()

    @property
    def places(self) -> list[Places]:
        """The map from device names to devices, for each local replica."""
        all_devices = [device.name for device in logical_devices()]
        owned = self.owned or [dict.fromkeys((home, *all_devices)) for home in self.devices]
        return [Places.of(list(own), all_devices) for own in owned]

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
        for each in self._replicas or ():
            if each.communicator is not None:
                each.communicator.close()
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

        results = self._in_threads(guarded)
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
        trace_failure.publish_traceback(members[0], self._called(0), error)  # before they read it
        if not trace_failure.all_alike(members, error):
            for index, member in enumerate(members):
                member.abort(trace_failure.reason(self._called(index), error))


_communicating: weakref.WeakSet[LocalReplicas] = weakref.WeakSet()
_collect_at = _DROPPED


def _collect_dropped() -> None:
    """Collect garbage if so many strategies have communicators that some may be garbage."""
    global _collect_at
    if len(_communicating) >= _collect_at:
        gc.collect()
        _collect_at = max(_DROPPED, 2 * len(_communicating))  # communicators in use stay


def _leave(members: Sequence[Communicator]) -> None:
    """Close without waiting for calls: the collector runs this also where locks are held."""
    for member in members:
        member._close(drain=False)
