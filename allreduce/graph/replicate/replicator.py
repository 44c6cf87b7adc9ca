"""Run one program on every replica; strategies choose the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from allreduce.devices import options
from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.core.host_future import HostFuture, Output
from allreduce.graph.core.node import Graph
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.tensor import concrete
from allreduce.graph.eager.eager import run_eagerly
from allreduce.graph.replicate.compiled import Compiled, compile_alone, compile_step
from allreduce.graph.replicate.program_cache import ProgramCache, Programs
from allreduce.graph.replicate.replicas import Replicas, T
from allreduce.graph.trace.output_structure import OutputStructure
from allreduce.graph.trace.replica import Replica, StepInfo
from allreduce.graph.trace.signature import Arguments, take_apart
from allreduce.graph.trace.trace import HOST, check_outside
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.arenas import publish_iterations, renew
from allreduce.graph.update.program_check import compare
from allreduce.keywords import explain


class Replicator(Replicas):
    """Runs steps on its replicas; by default one replica on this process's first device.

    Attributes:
        shared: The variables that have equal values on all replicas.
    """

    def __init__(
        self,
        devices: Sequence[DeviceName] = (HOST,),
        first_replica: int = 0,
        total: int = 1,
        owned: Sequence[Sequence[DeviceName]] = (),
    ) -> None:
        super().__init__(devices, first_replica, total, owned)
        self.shared: WeakSet[Variable] = WeakSet()
        self._programs = ProgramCache()

    def __repr__(self) -> str:
        return "the single replica outside of any strategy"

    @explain()
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
            args: Its arguments; a PerReplica gives each replica its own value, others are the same
                for every replica.
            kwargs: Its keyword arguments, likewise.
            eagerly: Whether to run it op by op, as `ar.config.run_functions_eagerly(True)` does
                for all functions.

        Returns:
            The result of `fn`, with a PerReplica for each tensor.
        """
        check_outside("run", "call the function itself there")
        fn, arguments = self._together(fn, args, kwargs)
        returned, results, step_infos = self._results(fn, arguments, eagerly)
        return returned.rebuild(returned.per_replica(results, step_infos))

    def take_apart(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Arguments:
        """Flatten a call's arguments and compute their signature."""
        latest = self._programs.latest_arguments(fn)
        return take_apart((tuple(args), kwargs), self.local_replicas, latest)

    def _together(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> tuple[Callable[..., Any], Arguments]:
        """Check a call that all ranks make; returns the Python function, and the arguments."""
        try:
            _check_call(fn, args, kwargs)
            fn = getattr(fn, "python_function", fn)
            return fn, self.take_apart(fn, args, kwargs or {})
        except Exception as error:
            self._refuse(error)
            raise

    def run_alone(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        """Run `fn` on this process's first replica only, without other replicas or ranks."""
        returned, (values,), _ = self._results(fn, arguments, alone=True)
        return returned.rebuild(concrete(each, self.devices[0]) for each in values)

    def graph(self, fn: Callable[..., Any], arguments: Arguments) -> Graph:
        """Return a step's graph on each replica, without running it."""

        def current() -> Graph:
            self.rank_digest.batch_digests = ()  # as only shapes and dtypes count
            return self._compiled(self._programs.of(fn), fn, arguments).graph

        return self._exclusively(current)

    def note_assignment(self, variable: Variable, value: np.ndarray) -> None:
        """Record an assignment between steps, before it is made."""
        # Those that no step has met get the first replica's value, whatever they have here.
        if self._spans_ranks and variable in self.shared:
            self.rank_digest.assign(variable, value, users_line())

    def between_steps(self, work: Callable[[], T]) -> T:
        """Call `work` while no step can run."""
        return self._exclusively(work)

    def latest(self, fn: Callable[..., Any]) -> Compiled | None:
        """Return the compiled step that a function ran last, or None."""
        return self._programs.of(getattr(fn, "python_function", fn)).latest

    def _compiled(
        self,
        programs: Programs,
        fn: Callable[..., Any],
        arguments: Arguments,
        alone: bool = False,
    ) -> Compiled:
        """Return the step of a function; all ranks do so together, but where one runs it alone."""
        made: list[Compiled] = []

        def make() -> Compiled:
            if alone:
                made.append(compile_alone(self, fn, arguments, self._first()))
            else:
                made.append(compile_step(self, fn, arguments))
            return made[0]

        try:
            compiled = programs.get(fn, arguments, make, alone)
        except Exception as error:
            if not alone:
                self._refuse(error)
            raise
        if not made:
            self.rank_digest.involve(compiled.compared_variables)
        if compiled.agreement is not None and not made:
            compare(self, compiled.agreement, arguments.rows_per_replica is not None)
        return compiled

    def _results(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        eagerly: bool = False,
        alone: bool = False,
    ) -> tuple[OutputStructure, Sequence[Sequence[Output]], list[StepInfo]]:
        """Run a step; return its results, each replica's values, and its `StepInfo`."""
        eagerly = eagerly or options.current().functions_run_eagerly
        alone = alone and self.num_replicas_in_sync > 1

        def run() -> tuple[OutputStructure, Sequence[Sequence[Output]], list[StepInfo]]:
            programs = self._programs.of(fn)
            self.rank_digest.batch_digests = arguments.batch_digests
            compiled = None if eagerly else self._compiled(programs, fn, arguments, alone)
            for _, plan in () if compiled is None else compiled.updates:
                self.check_update(plan.check)
            programs.steps += 1
            step_infos = arguments.step_infos(
                self.local_replicas, self.num_replicas_in_sync, programs.steps
            )
            if compiled is not None:
                programs.latest = compiled
                return (
                    compiled.returned,
                    self._run_compiled(compiled, arguments, step_infos),
                    step_infos,
                )
            replicas = [self._first()] if alone else self.replicas
            return *self._run_eagerly(replicas, fn, arguments, step_infos), step_infos

        return self._exclusively(run)

    def check_update(self, check: Callable[[], None]) -> None:
        """Check an optimizer's next update; if it raises on all ranks, they can go on."""
        try:
            check()
        except Exception as error:
            if self._refuse(error):
                vars(error)["everywhere"] = True  # so that an eager step is not aborted
            raise

    def _run_eagerly(
        self,
        replicas: list[Replica],
        fn: Callable[..., Any],
        arguments: Arguments,
        step_infos: list[StepInfo],
    ) -> tuple[OutputStructure, Sequence[Sequence[Output]]]:
        try:
            return run_eagerly(self, replicas, fn, arguments, step_infos)
        except BaseException as error:
            if replicas[0].communicator is not None:
                for replica in replicas:
                    self._tell(replica.index, error)
            raise

    def _run_compiled(
        self, compiled: Compiled, arguments: Arguments, step_infos: Sequence[StepInfo]
    ) -> Sequence[Sequence[Output]]:
        """Run one step on each replica that it was compiled for; return all fetched values."""
        for _, plan in compiled.updates:
            plan.take_over()
        compiled.begin()
        compiled.fed, self.fed = self.fed, None

        executors, batch = compiled.executors, arguments.rows is not None
        feeds: list[Sequence[Any]] = [
            [values[index] for values in arguments.feeds] for index in range(len(executors))
        ]

        def prepare(index: int) -> Sequence[Any]:
            return executors[index].prepare(feeds[index], step_infos[index], batch)

        def step(index: int) -> list[Output]:
            return executors[index].run(feeds[index], step_infos[index], batch)

        try:
            if executors[0].replica.communicator is None:
                results = [step(0)]
            else:
                # All of them before any begins a collective, during which nothing may allocate.
                each = zip(executors, feeds, step_infos, strict=True)
                if not all(executor.is_prepared(given, info) for executor, given, info in each):
                    feeds = self.on_replicas(prepare)
                results = self.on_replicas(step)
                for output in [each for values in results for each in values]:
                    if isinstance(output, HostFuture):
                        output.owner = self
        except BaseException:
            for _, plan in compiled.updates:
                plan.accumulation.discard()
            raise
        for executor, given in zip(executors, feeds, strict=True):
            executor.order_caller(given)
        for rule, plan in compiled.updates:
            plan.accumulation.end()
            publish_iterations(rule)
        return results

    def _forget(self) -> None:
        # The error may have stopped some replicas before an assignment and others after it: from
        # here on, variables are taken from the first replica.
        self._programs.clear()
        self.shared.clear()
        renew(self)

    def steps_of(self, fn: Callable[..., Any]) -> int:
        """Return how often a function has run, which its random draws depend on."""
        return self._programs.of(getattr(fn, "python_function", fn)).steps

    def set_steps(self, fn: Callable[..., Any], steps: int) -> None:
        """Set how often a function has run."""
        self._programs.of(getattr(fn, "python_function", fn)).steps = steps


def _check_call(fn: Any, args: Any, kwargs: Any) -> None:
    if not callable(fn):
        raise UsageError(f"run takes a function, not {type(fn).__name__} {fn!r:.60}")
    if not isinstance(args, (list, tuple)) or not (kwargs is None or isinstance(kwargs, dict)):
        raise UsageError(
            f"run takes the arguments as args=(x, y) and kwargs={{...}}; got args of type "
            f"{type(args).__name__} and kwargs of type {type(kwargs).__name__}"
        )
