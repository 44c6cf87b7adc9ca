"""The executor: runs a program on one replica, bound to memory per batch size."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from allreduce.devices import lookup, options
from allreduce.errors import OutOfMemoryError, UsageError
from allreduce.graph.consistency.rank_check import Facts
from allreduce.graph.core.host_future import Output
from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.execute.inter_op_pool import end
from allreduce.graph.partition.rendezvous import LocalRendezvous, Rendezvous
from allreduce.graph.schedule.empty_shard import null_program
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.program_facts import ProgramFacts
from allreduce.graph.trace.replica import Replica, StepInfo
from allreduce.graph.trace.subgraph import joins_rows
from allreduce.reduction import Arena

# A program stays bound for the two batch sizes used last, such as a dataset's usual size and its
# smaller last one, and for as many others as fit in this many bytes. Binding takes the time of some
# ten steps of a small model, and 0.25 ms for each MiB of fresh memory.
KEPT_BYTES = 256 << 20
_ALWAYS_KEPT = 2


class Executor:
    """Runs one program on one replica, one batch at a time.

    CPU streams run each instruction before the next is issued; only collectives are
    asynchronous.

    Args:
        rendezvous: Exchanges values between devices, and with other tasks.
    """

    def __init__(
        self,
        program: Program,
        replica: Replica,
        arenas: Mapping[int, Arena],
        summary: Facts | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.program = program
        self.replica = replica
        self.arenas = arenas
        self.summary = summary
        self.rendezvous = LocalRendezvous() if rendezvous is None else rendezvous
        self._facts = ProgramFacts(program)
        self._bound: OrderedDict[tuple[int, tuple[int, ...] | None], BoundProgram] = OrderedDict()
        self._joins_rows = joins_rows(each.node for each in program.instructions)
        replica.releasable.add(self)

    @property
    def latest(self) -> BoundProgram | None:
        """The bound program of the latest step."""
        return next(reversed(self._bound.values()), None)

    @property
    def bound_programs(self) -> list[BoundProgram]:
        """The program bound to memory, for each of several batch sizes."""
        return list(self._bound.values())

    def run(self, feeds: Sequence[Any], info: StepInfo, batch: bool) -> list[Output]:
        """Run one step.

        Args:
            feeds: The program's inputs; read until the call returns.
            batch: Whether some input is a share of a batch; the null program runs if it is empty.

        Returns:
            The fetched values, in memory that belongs to the caller.

        Raises:
            OutOfMemoryError: Memory is exhausted; the message names the largest values.
        """
        if self.replica.runs:  # after an interrupt, threads may still be active
            end(self.replica.runs)
        try:
            bound = self._bound_for(info, batch)
            try:
                return bound.run(feeds, info)
            except BaseException as error:
                self.rendezvous.abort(self.replica.generation, info.step, error)
                raise
        except MemoryError as error:
            self._raise_shortage(error)

    def is_prepared(self, feeds: Sequence[Any], info: StepInfo) -> bool:
        """Return whether a step finds the memory and kernels that its devices need."""
        if not self._facts.beside_host:
            return True
        bound = self._bound.get(self._sizes(info))
        return bound is not None and bound.is_placed(feeds)

    def prepare(self, feeds: Sequence[Any], info: StepInfo, batch: bool) -> Sequence[Any]:
        """Take memory and load kernels for a step; arguments and errors as of `run`.

        Returns:
            The feeds, copied to their devices.
        """
        try:
            return self._bound_for(info, batch).place(feeds)
        except MemoryError as error:
            self._raise_shortage(error)

    def order_caller(self, feeds: Sequence[Any]) -> None:
        """Let the caller overwrite arrays on devices that the latest step was fed."""
        if self.latest is not None and any(type(feed) is not np.ndarray for feed in feeds):
            self.latest.frame.queues.order_caller()

    def _raise_shortage(self, error: MemoryError) -> NoReturn:
        """Raise an error that names the device without memory, and the largest uses."""
        if isinstance(error, OutOfMemoryError):
            raise error  # a device's is complete
        places = self.replica.places
        memory = lookup(places.names[places.home]).memory
        where = ", ".join(getattr(error, "__notes__", ()))
        raise OutOfMemoryError(
            f"no memory on {places.home.local}: {error}{where and f' ({where})'}; use a smaller "
            f"model or batch, or fewer replicas per host{memory.largest()}"
        ) from error

    def _sizes(self, info: StepInfo) -> tuple[int, tuple[int, ...] | None]:
        return info.rows, info.rows_per_replica if self._joins_rows else None

    def _bound_for(self, info: StepInfo, batch: bool) -> BoundProgram:
        sizes = self._sizes(info)
        bound = self._bound.get(sizes)
        if bound is None:
            bound = self._bound[sizes] = self._bind(info, batch)
            self._evict()
        self._bound.move_to_end(sizes)
        return bound

    def _bind(self, info: StepInfo, batch: bool) -> BoundProgram:
        """Bind the program to memory; if there is too little, release other bound programs."""
        if self._joins_rows and info.rows_per_replica is None:
            raise UsageError(
                "the step gathers the rows of all replicas, and how many there are is not "
                "known; make the batches with strategy.distribute_dataset"
            )
        facts = self._facts if info.rows or not batch else self._null_facts

        def bind() -> BoundProgram:
            return BoundProgram(
                *(facts, self.replica, self.arenas, self.rendezvous, info, self.summary),
                threads=_threads(),
            )

        with contextlib.suppress(MemoryError):  # also a device's
            return bind()
        for each in self.replica.releasable:  # other replicas may be inside a step
            each.release_frames()
        return bind()

    @cached_property
    def _null_facts(self) -> ProgramFacts:
        return ProgramFacts(null_program(self.program))

    def _evict(self) -> None:
        """Release the least recently used bound programs while their total is too large."""
        total = sum(bound.nbytes for bound in self._bound.values())
        while total > KEPT_BYTES and len(self._bound) > _ALWAYS_KEPT:
            _, bound = self._bound.popitem(last=False)
            total -= bound.nbytes
            bound.release()

    def release_frames(self) -> None:
        """Free the memory of all bound programs; later steps bind them again."""
        while self._bound:
            self._bound.popitem()[1].release()

    def release(self) -> None:
        """Free all memory, and the error of a failed step; no more steps can run."""
        self.release_frames()
        self.replica.releasable.discard(self)
        vars(self).clear()


def _threads() -> int:
    chosen = options.current()  # one thread finds the first operation that makes a NaN
    return 1 if chosen.check_numerics or chosen.sync_errors else chosen.inter_op_threads
