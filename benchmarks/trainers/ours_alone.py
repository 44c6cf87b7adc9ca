"""Figures without a peer: how well input is hidden, and the cost of an instruction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import allreduce as ar
import numpy as np
from workloads.base import Array, Workload

from trainers import ours

_STEPS, _ROUNDS = 15, 5  # of a round; the first ones start threads and are not counted
_LEFT_OUT = 3
_SHORT, _LONG = 100, 1100  # instructions
_FEWEST = 10  # runs of the programs that have so many
_DRAWN = 1 << 16  # numbers at a time: some 200 µs in which the lock is free, as a decoder leaves it
_TRIALS = 50  # of how long that takes


class Slow:
    """A dataset whose batches take some time, in which others may run Python.

    Args:
        batch: The batch that it yields.
        wait: Takes the time.
    """

    def __init__(self, batch: tuple[Array, ...], wait: Callable[[], object]) -> None:
        self._batch = batch
        self._wait = wait

    def __iter__(self) -> Iterator[tuple[Array, ...]]:
        for _ in range(_STEPS):
            self._wait()
            yield self._batch


class Input(ours.Ours):
    """The large MLP's step on batches each of which takes as long as the step."""

    def __init__(self, workload: Workload) -> None:
        self._strategy = ar.MirroredStrategy()
        with self._strategy.scope():
            super().__init__(ours.training(ours.mlp)(workload))
        self._batch = next(workload.batches(0, 1))

    def step(self, *batch: Array) -> Any:
        """Do one step without any input."""
        return self._strategy.run(
            self._step, args=tuple(ar.PerReplica((each,)) for each in batch)
        ).values[0]

    def figures(self, seconds: float) -> dict[str, float]:
        """Return what a step takes of the longer of input and compute: with two kinds of input."""
        compute = statistics.median(self._computing() for _ in range(_ROUNDS))
        return {
            "waits": self._of_longer(lambda: time.sleep(compute)),
            "computes": self._of_longer(_work(compute)),
        }

    def _of_longer(self, wait: Callable[[], object]) -> float:
        """Measure step ÷ max(input, compute), each in turn."""
        found = []
        for _ in range(_ROUNDS):
            alone = _median(Slow(self._batch, wait))
            batches = self._strategy.distribute_dataset(Slow(self._batch, wait))
            both = _median(self._strategy.run(self._step, args=batch) for batch in batches)
            found.append(both / max(alone, self._computing()))
        return statistics.median(found)

    def _computing(self) -> float:
        return _median(self.step(*self._batch) for _ in range(_STEPS))


def _median(items: Any) -> float:
    """Return the median time from one item to the next."""
    moments = [time.perf_counter() for _ in items]
    return statistics.median(np.diff(moments[_LEFT_OUT:]).tolist())


def _work(seconds: float) -> Callable[[], object]:
    """Make something that computes for so long, without holding the interpreter's lock."""
    random, numbers = np.random.default_rng(0), np.empty(_DRAWN)

    def draw(times: int) -> None:
        for _ in range(times):
            random.random(out=numbers)

    start = time.perf_counter()
    draw(_TRIALS)
    times = max(1, round(_TRIALS * seconds / (time.perf_counter() - start)))
    return lambda: draw(times)


class Instructions(ours.Ours):
    """Programs of many additions of one number each, which are not fused."""

    def __init__(self, workload: Workload) -> None:
        # For good: switched back on, the next call would be traced anew, as one chain.
        ar.config.passes["fuse"] = False
        self._x = np.ones(1, np.float32)
        self._short, long = _additions(_SHORT), _additions(_LONG)
        super().__init__(long)
        for program in (self._short, long):  # traces
            program(self._x)

    def step(self, *batch: Array) -> Any:
        """Run the long program."""
        return self._step(self._x)

    def figures(self, seconds: float) -> dict[str, float]:
        """Return the seconds that one instruction more takes, its kernel included."""
        found: list[float] = []
        end = time.perf_counter() + seconds
        while len(found) < _FEWEST or time.perf_counter() < end:
            taken = []
            for program in (self._short, self._step):
                start = time.perf_counter()
                program(self._x)
                taken.append(time.perf_counter() - start)
            found.append((taken[1] - taken[0]) / (_LONG - _SHORT))
        return {"instruction": statistics.median(found)}


def _additions(count: int) -> ours.Step:
    def program(x: ar.Tensor) -> ar.Tensor:
        for i in range(count):
            x = x + float(i + 1)
        return x

    return ar.function(program)


SIDES: dict[str, Callable[[Workload], ours.Ours]] = {"input": Input, "instructions": Instructions}
