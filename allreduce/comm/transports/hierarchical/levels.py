"""Levels, the smaller communicators of a hierarchical one, and the chains that run on them.

A host's members have two levels, "in" before and "out" after the exchange between hosts; each lane
has one, "across". The level "every" has all members; it exists if MPI carries data between hosts,
otherwise the control channel replaces it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from allreduce.comm.arguments import scaling
from allreduce.comm.calls.call import Array
from allreduce.comm.core import progress
from allreduce.comm.core.transport import LevelTransport
from allreduce.comm.core.work import LevelWork
from allreduce.comm.transports.hierarchical.steps import MEMORY, Chain, Copies, Division, Part, Step
from allreduce.comm.transports.tcp.transport import TcpWork
from allreduce.errors import AllreduceError


class Level:
    """One level, with a queue of the chains that have steps on it, in order.

    Args:
        numbers: Its members' indices in the larger communicator.
    """

    def __init__(self, transport: LevelTransport, numbers: tuple[int, ...]) -> None:
        self.transport, self.numbers = transport, numbers
        self.queue: deque[ChainRun] = deque()


class LevelError(Exception):
    """A level has failed."""

    def __init__(self, error: AllreduceError, agreed: TcpWork) -> None:
        super().__init__(str(error))
        self.error, self.agreed = error, agreed


T = TypeVar("T")


def guarded(do: Callable[[], T], agreed: TcpWork) -> T:
    """Call a function of a level, for the caller's call.

    Raises:
        LevelError: The level has failed.
    """
    try:
        return do()
    except AllreduceError as error:
        raise LevelError(error, agreed) from error


_CHAINS = 16  # in flight in one member; each poll visits all


class ChainRun:
    """A chain in execution, with its arrays."""

    def __init__(self, chain: Chain, agreed: TcpWork, x: Array | None, out: Array | None) -> None:
        self.chain, self.agreed = chain, agreed
        self._arrays = {
            name: array.reshape(-1) for name, array in (("x", x), ("out", out)) if array is not None
        }
        given = x if x is not None else out
        wide = given is None or str(given.dtype) != chain.dtype
        self._dtype = np.dtype(chain.dtype) if wide or given is None else given.dtype
        self._at = 0
        self.current: LevelWork | None = None
        self.level: Level | None = None  # of the current step

    @property
    def finished(self) -> bool:
        return self._at == len(self.chain.steps)

    def admit(self) -> None:
        """Allocate the working memory.

        Raises:
            MemoryError: There is too little.
        """
        for name, count in self.chain.memory.items():
            self._arrays[name] = np.empty(count, self._dtype)

    def advance(self, levels: Mapping[str, Level]) -> bool:
        """Make progress without blocking; return whether there was any.

        Raises:
            LevelError: A level has failed.
        """
        if self.agreed.native.failed:  # a fault came before all members had posted the call
            return False
        moved = False
        while not self.finished:
            if self.current is not None:
                if not self._finish_step(self.current):
                    break
                self.current = self.level = None
                self._at += 1
            elif not self._start_step(self.chain.steps[self._at], levels):
                break
            moved = True
        if self.finished:
            self._arrays.clear()
        return moved

    def _finish_step(self, current: LevelWork) -> bool:
        if not guarded(current.done, self.agreed):
            return False
        current.wait()  # lets its transport release it
        return True

    def _start_step(self, step: Step | Copies | Division, levels: Mapping[str, Level]) -> bool:
        """Start a step if it is its turn; the output is written once all members have agreed."""
        if step.target is not None and step.target.array == "out" and not self.agreed.native.done:
            return False
        if isinstance(step, Step):
            return self._call(step, levels[step.level])
        if isinstance(step, Division):
            scaling.divide(self._array(step.target), step.by)
        else:
            for source, target in step.pairs:
                self._array(target)[...] = self._array(source)
        self._at += 1
        return True

    def _call(self, step: Step, level: Level) -> bool:
        if level.queue[0] is not self:
            return False
        level.queue.popleft()
        x = None if step.source is None else self._array(step.source)
        out = None if step.target is None else self._array(step.target)
        self.level = level
        begin = partial(level.transport.start, step.call, x, out, lambda: None)
        self.current = guarded(begin, self.agreed)
        return True

    def _array(self, part: Part) -> Array:
        return self._arrays[part.array][part.start : part.stop]


class ChainQueue:
    """The unfinished chains of one member, in the order of their start."""

    def __init__(self, levels: Mapping[str, Level]) -> None:
        self._levels = levels
        self._waiting: deque[ChainRun] = deque()
        self.active: list[ChainRun] = []

    @property
    def unfinished(self) -> list[ChainRun]:
        """All unfinished chains, in order."""
        return [*self.active, *self._waiting]

    def add(self, run: ChainRun) -> None:
        """Append a chain."""
        for step in run.chain.steps:
            if isinstance(step, Step):
                self._levels[step.level].queue.append(run)
        self._waiting.append(run)

    def advance(self) -> bool:
        """Make progress without blocking; return whether chains are left.

        Raises:
            LevelError: A level has failed.
            MemoryError: There is too little working memory.
        """
        moved = True
        while moved:
            moved = self._admit()
            for run in self.active:
                moved = run.advance(self._levels) or moved
            self.active = [run for run in self.active if not run.finished]
        return bool(self.active)

    def clear(self) -> None:
        """Remove all chains."""
        self._waiting.clear()
        self.active.clear()
        for level in self._levels.values():
            level.queue.clear()

    def running_works(self) -> list[tuple[LevelWork, Level, TcpWork]]:
        """Return the levels' calls in flight, each with its level and the caller's call.

        The first delays the others.
        """
        return [
            (run.current, run.level, run.agreed) for run in self.active if run.current and run.level
        ]

    def _admit(self) -> bool:
        admitted = False
        while self._waiting and len(self.active) < _CHAINS:
            held = sum(run.chain.nbytes for run in self.active)
            if self.active and held + self._waiting[0].chain.nbytes > MEMORY:
                break
            run = self._waiting.popleft()
            run.admit()
            self.active.append(run)
            admitted = True
        return admitted


class DrivenTransport(Protocol):
    """A transport with calls to drive."""

    def drive(self) -> bool: ...


# By id. Listing the references is atomic in the interpreter: other threads may add to them.
_transports: weakref.WeakValueDictionary[int, DrivenTransport] = weakref.WeakValueDictionary()


def register(transport: DrivenTransport) -> None:
    """Drive a transport for as long as it lives."""
    _transports[id(transport)] = transport


def drive_all() -> bool:
    """Make progress on all calls of this process; return whether some are in flight."""
    transports = (reference() for reference in _transports.valuerefs())
    busy = [transport.drive() for transport in transports if transport is not None]
    return any(busy)


progress.drivers.append(drive_all)
