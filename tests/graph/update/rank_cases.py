"""What the ranks of `test_zero_update.py` do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import allreduce as ar
from allreduce.graph.update import arenas
from allreduce.reduction import sharding

SHAPES = [(300, 701), (701, 37), (37, 301), (301, 300), (300, 3)]
MAKERS: dict[str, Callable[[], ar.optim.Optimizer]] = {
    "adam": lambda: ar.optim.Adam(0.01),
    "momentum": lambda: ar.optim.SGD(0.01, momentum=0.9),
}


class Deep:
    """Layers of uneven sizes, trained in buckets of which all but the last are large.

    Args:
        strategy: Whose replicas have them.
        name: Of the optimizer.
        everywhere: Whether large buckets are updated in slices.
    """

    def __init__(self, strategy: ar.Strategy, name: str, everywhere: bool) -> None:
        sharding.SHARDED_BYTES = 50_000
        ar.config.set_buckets(150_000)
        ar.config.set_shard_everywhere(everywhere)
        self.strategy, self.optimizer = strategy, MAKERS[name]()
        generator = np.random.default_rng(0)
        with strategy.scope():
            self.variables = [
                ar.Variable(generator.normal(size=shape).astype(np.float32) / 9, name=f"m/{i}")
                for i, shape in enumerate(SHAPES)
            ]
        self.x = generator.normal(size=(11, SHAPES[0][0])).astype(np.float32)
        self.step = ar.function(self._step)
        self.run()  # what is chosen now holds for it

    def _step(self, x: Any) -> Any:
        for variable in self.variables:
            x = ar.ops.tanh(x @ variable)
        self.optimizer.minimize(ar.ops.sum(ar.ops.square(x), axis=1), self.variables)
        return ar.ops.sum(self.variables[0])  # which waits for all slices

    def run(self, **how: Any) -> None:
        (batch,) = self.strategy.distribute_dataset([(self.x,)])
        self.last = self.strategy.local_results(self.strategy.run(self.step, args=batch, **how))[0]

    @property
    def ways(self) -> list[str]:
        (plan,) = arenas._plans_of(self.optimizer)
        return sorted({way.value for way in plan.sharded.values()})

    def values(self) -> dict[str, np.ndarray]:
        """Give the variables, on all replicas of this rank, and the optimizer's state."""
        self.optimizer.consolidate()
        copies = {
            f"{v.name}/{i}": c.copy() for v in self.variables for i, c in enumerate(v.storage)
        }
        return {**copies, "last": np.asarray(self.last), **self.optimizer.state()}


def train(strategy: ar.Strategy) -> tuple[dict[str, bool], list[str]]:
    """Train in slices and plainly; returns what is as it should be, and how buckets were added."""
    found: dict[str, bool] = {}
    ways: list[str] = []
    for name in MAKERS:
        plain, sliced = Deep(strategy, name, False), Deep(strategy, name, True)
        for each in (plain, sliced):
            each.run(eagerly=True)
            each.run()
        ways += sliced.ways
        found[f"{name}: plain"] = not plain.ways
        found[f"{name}: spread"] = _refused(sliced.optimizer.state, ar.UsageError, "consolidate()")
        found[name] = _same(sliced.values(), plain.values())
        for each in (plain, sliced):
            state = each.optimizer.state()  # which is whole until the next step
            each.optimizer.load_state({key: value / 2 for key, value in state.items()})
            each.run()
        found[f"{name}: loaded"] = _same(sliced.values(), plain.values())
    return found, sorted(set(ways))


def end(strategy: ar.Strategy, dead: int) -> dict[str, bool]:
    """Have ranks differ, and then one die, if it is to."""
    found: dict[str, bool] = {}
    rank = strategy.communicator.rank
    deep = Deep(strategy, "adam", True)
    before = deep.values()
    deep.optimizer.learning_rate = 0.5 if rank else 0.25
    found["told"] = _refused(deep.run, ar.MismatchError, "learning_rate=0.25")
    found["unchanged"] = _same(deep.values(), before)
    deep.optimizer.learning_rate = 0.01
    if dead:
        if rank == dead:
            os._exit(0)
        found["lost"] = _refused(deep.run, ar.PeerLostError, f"rank {dead}")
        found["over"] = _refused(deep.optimizer.consolidate, ar.ClosedError, "another strategy")
    return found


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def _refused(work: Callable[[], object], kind: type[Exception], words: str) -> bool:
    try:
        work()
    except kind as error:
        return words in str(error)
    return False
