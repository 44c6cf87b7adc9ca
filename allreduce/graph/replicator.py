"""Running one replica's program on each of its devices; strategies say which devices those are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.devices.names import DeviceName
from allreduce.errors import PeerLostError, UsageError
from allreduce.graph.arenas import Arenas
from allreduce.graph.compiled import Compiled, ProgramCache, compile_alone, compile_step
from allreduce.graph.executor import Moment, Replica
from allreduce.graph.per_replica import PerReplica
from allreduce.graph.signature import Arguments, take_apart
from allreduce.graph.tensor import ConcreteTensor
from allreduce.graph.trace import HOST
from allreduce.graph.variable import set_owner_source


class Replicator:
    """The replicas of a program: by itself one, on this process's first device.

    Attributes:
        devices: This process's replicas' devices, in order.
        first_replica: The id of the first of them among all replicas.
        num_replicas_in_sync: How many replicas there are, over all ranks.
    """

    def __init__(
        self, devices: Sequence[DeviceName] = (HOST,), first_replica: int = 0, total: int = 1
    ) -> None:
        self.devices = tuple(devices)
        self.first_replica = first_replica
        self.num_replicas_in_sync = total
        self.steps = 0
        self.arenas = Arenas(self)
        self._programs = ProgramCache()
        self._replicas: list[Replica] | None = None
        self._making = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return "the single replica outside of any strategy"

    @property
    def local_replicas(self) -> int:
        return len(self.devices)

    @property
    def communicator(self) -> Communicator | None:
        """The communicator with one member per process; None where there is only this process."""
        return None

    def replica_communicators(self) -> list[Communicator]:
        """Make the communicators of this process's replicas, of one member per replica."""
        raise UsageError("a single replica has nobody to communicate with")

    def sum_over_ranks(self, array: np.ndarray) -> np.ndarray:
        """Add up an array of every rank's."""
        communicator = self.communicator
        if communicator is None:
            return array
        result = communicator.all_reduce(np.asarray(array, order="C"), op="sum")
        assert isinstance(result, np.ndarray)
        return result

    @property
    def replicas(self) -> list[Replica]:
        """This process's replicas; their communicators are made when first needed."""
        with self._making:  # replicas' threads may ask at the same time
            if self._replicas is None:
                several = self.num_replicas_in_sync > 1
                members = self.replica_communicators() if several else [None]
                ids = range(self.first_replica, self.first_replica + self.local_replicas)
                self._replicas = [
                    Replica(index, id, member)
                    for index, (id, member) in enumerate(zip(ids, members, strict=True))
                ]
            return self._replicas

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `fn` as one step on every replica.

        Args:
            fn: A function of arrays; it is traced once per signature, as one replica's program.
            args: Its arguments; a PerReplica gives each replica its own, all others go unchanged to
                every replica.
            kwargs: Its keyword arguments, likewise.

        Returns:
            What `fn` returns, with a PerReplica in place of each tensor.
        """
        arguments = take_apart((tuple(args), dict(kwargs or {})), self.local_replicas)
        compiled = self.compiled(getattr(fn, "python_function", fn), arguments)
        rows = arguments.rows or (1,) * self.local_replicas
        offsets = arguments.offsets or (0,) * self.local_replicas
        self.steps += 1

        def step(index: int) -> list[np.ndarray]:
            feeds = [values[index] for values in arguments.feeds]
            moment = Moment(rows[index], offsets[index], self.steps)
            return compiled.executors[index].run(feeds, moment, arguments.rows is not None)

        results = self.on_replicas(step)
        self.arenas.publish_iterations()
        leaves = iter(PerReplica(values, rows, offsets) for values in zip(*results, strict=True))
        return compiled.rebuild(leaves)

    def run_alone(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        """Run `fn` on this process's first replica only; no other rank or replica takes part."""
        if self.num_replicas_in_sync == 1:
            compiled = self.compiled(fn, arguments)
        else:
            compiled = self._programs.get(
                fn, ("alone", arguments.key), lambda: self._alone(fn, arguments)
            )
        self.steps += 1
        feeds = [values[0] for values in arguments.feeds]
        values = compiled.executors[0].run(feeds, Moment(1, 0, self.steps), False)
        self.arenas.publish_iterations()
        return compiled.rebuild(iter([ConcreteTensor(each, self.devices[0]) for each in values]))

    def compiled(self, fn: Callable[..., Any], arguments: Arguments) -> Compiled:
        """Return the executors for a signature, tracing if it is new."""
        return self._programs.get(
            fn, arguments.key, lambda: compile_step(self, self.arenas, fn, arguments)
        )

    def _alone(self, fn: Callable[..., Any], arguments: Arguments) -> Compiled:
        return compile_alone(self, fn, arguments, Replica(0, self.first_replica, None))

    def on_replicas(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(index)` for all local replicas at once, each in its own thread if several.

        If one raises, the others are released from their collectives and the first error is raised.
        """
        if self.local_replicas == 1:
            return [work(0)]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.local_replicas, "allreduce-replica")
        failures: list[BaseException] = []
        guard = threading.Lock()

        def guarded(index: int) -> Any:
            try:
                return work(index)
            except BaseException as error:
                with guard:
                    failures.append(error)
                member = self._replicas[index].communicator if self._replicas else None
                if member is not None:
                    member.abort(f"replica {self.first_replica + index} raised {error!r}")
                return None

        results = list(self._threads.map(guarded, range(self.local_replicas)))
        if failures:
            # What the others raise because their communicator was aborted only echoes the cause.
            raise next((e for e in failures if not isinstance(e, PeerLostError)), failures[0])
        return results

    def close(self) -> None:
        """End the replicas' threads and communicators."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        for replica in self._replicas or ():
            if replica.communicator is not None:
                replica.communicator.close()
        self._replicas = None


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Replicator] = []


_scopes = _Scopes()
_default: Replicator | None = None


def default_replicator() -> Replicator:
    """Return the single replica that everything outside of a strategy's scope belongs to."""
    global _default
    if _default is None:
        _default = Replicator()
    return _default


def current_replicator() -> Replicator:
    """Return the innermost scope's replicator, or the default one."""
    return _scopes.stack[-1] if _scopes.stack else default_replicator()


@contextmanager
def scope_of(replicator: Replicator) -> Iterator[Replicator]:
    """Give what the block makes to `replicator`."""
    _scopes.stack.append(replicator)
    try:
        yield replicator
    finally:
        _scopes.stack.pop()


set_owner_source(current_replicator)
