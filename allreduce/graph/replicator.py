"""Running one replica's program on each of its devices; strategies say which devices those are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np

from allreduce.comm import Communicator, total
from allreduce.comm.locks import owned
from allreduce.devices import logical_devices, options
from allreduce.devices.names import DeviceName
from allreduce.errors import PeerLostError, UsageError
from allreduce.graph.arenas import publish_iterations, renew
from allreduce.graph.compiled import Compiled, ProgramCache, compile_alone, compile_step
from allreduce.graph.eager_step import run_eagerly
from allreduce.graph.node import Graph
from allreduce.graph.places import Places
from allreduce.graph.replica import Moment, Replica
from allreduce.graph.returned import Returned
from allreduce.graph.signature import Arguments, take_apart
from allreduce.graph.tensor import ConcreteTensor
from allreduce.graph.threads import Threads
from allreduce.graph.trace import HOST, check_outside
from allreduce.graph.variable import Variable


class Replicator:
    """The replicas of a program: by itself one, on this process's first device.

    Attributes:
        devices: This process's replicas' devices, in order; of several that one owns, the first.
        owned: All devices of each; empty where a replica may use what the process has.
        first_replica: The id of the first of them among all replicas.
        num_replicas_in_sync: How many replicas there are, over all ranks.
        generation: Of the world they are in.
        shared: The variables of which all replicas have been given equal copies.
    """

    generation = 0

    def __init__(
        self,
        devices: Sequence[DeviceName] = (HOST,),
        first_replica: int = 0,
        total: int = 1,
        owned: Sequence[Sequence[DeviceName]] = (),
    ) -> None:
        self.devices = tuple(devices)
        self.owned = tuple(map(tuple, owned))
        self.first_replica = first_replica
        self.num_replicas_in_sync = total
        self.shared: WeakSet[Variable] = WeakSet()
        self._programs = ProgramCache()
        self._replicas: list[Replica] | None = None
        self._making = threading.Lock()
        self._running = threading.RLock()  # buffers belong to one step at a time
        self._threads: Threads | None = None
        self._stale = False  # whether what a dead communicator leaves has still to be made anew

    def __repr__(self) -> str:
        return "the single replica outside of any strategy"

    @property
    def local_replicas(self) -> int:
        return len(self.devices)

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

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        eagerly: bool = False,
    ) -> Any:
        """Run `fn` as one step on every replica.

        Args:
            fn: A function of arrays; it is traced once per signature, as one replica's program.
            args: Its arguments; a PerReplica gives each replica its own, all others go unchanged to
                every replica.
            kwargs: Its keyword arguments, likewise.
            eagerly: Whether to run it op by op, as `ar.config.run_functions_eagerly(True)` has all
                functions do.

        Returns:
            What `fn` returns, with a PerReplica in place of each tensor.
        """
        check_outside("run", "call the function itself there")
        if not callable(fn):
            raise UsageError(f"run takes a function, not {type(fn).__name__} {fn!r:.60}")
        if not isinstance(args, list | tuple) or not isinstance(kwargs, dict | None):
            raise UsageError(
                f"run takes the arguments as args=(x, y) and kwargs={{...}}; got args of type "
                f"{type(args).__name__} and kwargs of type {type(kwargs).__name__}"
            )
        arguments = take_apart((tuple(args), kwargs or {}), self.local_replicas)
        fn = getattr(fn, "python_function", fn)
        returned, results, moments = self._results(fn, arguments, eagerly)
        return returned.rebuild(returned.spread(results, moments))

    def run_alone(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        """Run `fn` on this process's first replica only; no other rank or replica takes part."""
        returned, (values,), _ = self._results(fn, arguments, alone=True)
        return returned.rebuild(ConcreteTensor(each, self.devices[0]) for each in values)

    def _first(self) -> Replica:
        """Return this process's first replica as one that has nobody beside it."""
        return Replica(0, self.first_replica, None, self.places[0])

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Let the block alone use the replicas; what an error has left of them is made good."""
        inside = owned(self._running)  # of a step, by its Python or by a signal's handler
        with self._running:
            if inside:
                if self._threads is not None and self._threads.busy:
                    raise UsageError(
                        f"a step of {self!r} was called in the middle of another one, by a "
                        "signal's handler; call it when that has returned"
                    )
                yield
                return
            try:
                self._stop("an interrupt")  # which another one may have kept from it
                self._renew()
                yield
            except BaseException as error:
                self._stop(repr(error))
                raise

    def graph(self, fn: Callable[..., Any], arguments: Arguments) -> Graph:
        """Return the graph of a step, as each replica runs it, without running it."""
        with self._exclusively():
            programs = self._programs.of(fn)
            return programs.get(fn, arguments, lambda: compile_step(self, fn, arguments)).graph

    def _results(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        eagerly: bool = False,
        alone: bool = False,
    ) -> tuple[Returned, list[list[np.ndarray]], list[Moment]]:
        """Run a step; returns what it returned, each replica's values, and what it was told."""
        eagerly = eagerly or options.current().functions_run_eagerly
        alone = alone and self.num_replicas_in_sync > 1
        with self._exclusively():
            programs = self._programs.of(fn)

            def make() -> Compiled:
                if alone:
                    return compile_alone(self, fn, arguments, self._first())
                return compile_step(self, fn, arguments)

            compiled = None if eagerly else programs.get(fn, arguments, make, alone)
            moments = arguments.moments(
                self.local_replicas, self.num_replicas_in_sync, programs.count_step()
            )
            if compiled is not None:
                return compiled.returned, self._step(compiled, arguments, moments), moments
            replicas = [self._first()] if alone else self.replicas
            return *self._run_eagerly(replicas, fn, arguments, moments), moments

    def _run_eagerly(
        self,
        replicas: list[Replica],
        fn: Callable[..., Any],
        arguments: Arguments,
        moments: list[Moment],
    ) -> tuple[Returned, list[list[np.ndarray]]]:
        try:
            return run_eagerly(self, replicas, fn, arguments, moments)
        except BaseException as error:
            if replicas[0].communicator is not None:
                for replica in replicas:
                    self._tell(replica.index, error)
            raise

    def _step(
        self, compiled: Compiled, arguments: Arguments, moments: Sequence[Moment]
    ) -> list[list[np.ndarray]]:
        """Run one step on each replica that it was compiled for; returns what each fetched."""
        for _, plan in compiled.updates:
            plan.take_over()

        def step(index: int) -> list[np.ndarray]:
            feeds = [values[index] for values in arguments.feeds]
            batch = arguments.rows is not None
            return compiled.executors[index].run(feeds, moments[index], batch)

        if compiled.executors[0].replica.communicator is None:
            results = [step(0)]
        else:
            results = self.on_replicas(step)
        for rule, _ in compiled.updates:
            publish_iterations(rule)
        return results

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

        The error has killed their communicator, and memory of a dead one is not used again. As it
        may have come to some replicas before an assignment and to others behind it, variables are
        those of the first replica from here on. What is interrupted is done again.
        """
        if self.local_replicas < self.num_replicas_in_sync:
            return
        members = [each.communicator for each in self._replicas or ()]
        self._stale |= any(member is not None and member.dead for member in members)
        if self._stale:
            self._close_communicators()
            self._programs.clear()
            self.shared.clear()
            renew(self)
            self._stale = False

    def set_steps(self, fn: Callable[..., Any], steps: int) -> None:
        """Say how often a function has run so far, which is what its random draws depend on."""
        self._programs.of(getattr(fn, "python_function", fn)).steps = steps

    def on_replicas(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(index)` for all local replicas at once, each in its own thread if several.

        If one raises, all others, of other ranks too, are released from their collectives, unless
        they raise it as well; the first error is raised.
        """
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

        results = [guarded(0)] if self.local_replicas == 1 else self._in_threads(guarded)
        if failures:
            # What the others raise because their communicator was aborted only echoes the cause.
            raise next((e for e in failures if not isinstance(e, PeerLostError)), failures[0])
        return results

    def _in_threads(self, work: Callable[[int], Any]) -> list[Any]:
        if self._threads is None:
            self._threads = Threads(self.local_replicas)
        return self._threads.do(work)

    def _tell(self, index: int, error: BaseException) -> None:
        """Let the replicas that wait for this one know that it does not come."""
        member = self._replicas[index].communicator if self._replicas else None
        if member is not None and not getattr(error, "everywhere", False):
            member.abort(f"replica {self.first_replica + index} raised {error!r}")

    def close(self) -> None:
        """End the replicas' threads and communicators."""
        if self._threads is not None:
            self._threads.end()
            self._threads = None
        self._close_communicators()

    def _close_communicators(self) -> None:
        for replica in self._replicas or ():
            if replica.communicator is not None:
                replica.communicator.close()
        self._replicas = None
