"""Buckets that are updated in slices, each replica its own: the bits are those of the plain way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import lookup, options
from allreduce.errors import NumericsError
from allreduce.reduction import sharding
from tests.harness import collector_off

MAKERS: dict[str, Callable[[], ar.optim.Optimizer]] = {
    "adam": lambda: ar.optim.Adam(0.01),
    "momentum": lambda: ar.optim.SGD(0.05, momentum=0.9),
    "nesterov": lambda: ar.optim.SGD(0.05, momentum=0.9, nesterov=True),
}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ar.config.set_logical_devices("CPU", 4)
    # Two large ones, and two small.
    monkeypatch.setattr(options, "_current", options.Options(buckets=2000))
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 3000)
    yield
    ar.config.passes["shard"] = True


class Trained:
    """A network of several sizes with two optimizers, the second one for what is added at the end.

    Args:
        replicas: How many.
        make: Makes an optimizer.
        dtype: Of the variables.
    """

    def __init__(
        self, replicas: int, make: Callable[[], ar.optim.Optimizer], dtype: str = "float32"
    ) -> None:
        self.strategy = ar.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        generator = np.random.default_rng(0)
        shapes = [(31, 257), (257,), (257, 13), (13,), (13, 1)]
        with self.strategy.scope():
            self.variables = [
                ar.Variable(generator.normal(size=shape).astype(dtype) / 10, name=f"m/{i}")
                for i, shape in enumerate(shapes)
            ]
            self.other = ar.Variable(np.ones((1, 31), dtype), name="m/other")
            self.optimizer, self.second = make(), make()
        self.x = generator.normal(size=(2 * replicas + 1, 31)).astype(dtype)
        self.step = ar.function(self._step)

    def _step(self, x: Any) -> Any:
        w1, b1, w2, b2, w3 = self.variables
        x = x * self.other
        h = ar.ops.tanh(ar.ops.tanh(x @ w1 + b1) @ w2 + b2)
        loss = ar.ops.sum(ar.ops.square(h @ w3 - 1.0), axis=1)
        self.optimizer.minimize(loss, self.variables)
        self.second.minimize(loss, [self.other])
        return loss

    def run(self, steps: int, rows: int | None = None, **how: Any) -> None:
        for _ in range(steps):
            (batch,) = self.strategy.distribute_dataset([(self.x[:rows],)])
            self.strategy.run(self.step, args=batch, **how)

    @property
    def operations(self) -> list[str]:
        latest = self.strategy.latest(self.step)
        assert latest is not None
        return [node.op for node in latest.graph.nodes]

    def values(self) -> list[np.ndarray]:
        """List all replicas' variables, and the optimizers' state."""
        copies = [copy.copy() for each in [*self.variables, self.other] for copy in each.storage]
        states = [each.state() for each in (self.optimizer, self.second)]
        return [*copies, *(state[key] for state in states for key in sorted(state))]


def both_ways(
    replicas: int, make: Callable[[], ar.optim.Optimizer], work: Callable[[Trained], Any]
) -> Trained:
    """Do the same in slices and plainly, and compare; returns what was trained in slices."""
    ar.config.passes["shard"] = False
    plain = Trained(replicas, make)
    work(plain)
    ar.config.passes["shard"] = True
    sliced = Trained(replicas, make)
    work(sliced)
    _equal(sliced, plain)
    return sliced


def _equal(one: Trained, other: Trained) -> None:
    for mine, theirs in zip(one.values(), other.values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_the_bits_are_the_same_for_any_number_of_replicas(name: str, replicas: int) -> None:
    def work(trained: Trained) -> None:
        trained.run(2)
        trained.optimizer.learning_rate /= 2
        trained.run(1, rows=1)  # none for the others
        trained.run(2)

    sliced = both_ways(replicas, MAKERS[name], work)
    counted = [sliced.operations.count(op) for op in ("update_slices", "update_bucket")]
    # Two of the four buckets are large; the header and the others are not.
    assert counted == ([0, 5] if replicas == 1 else [2, 4])


def test_the_bits_are_the_same_in_float64_and_of_steps_that_run_eagerly() -> None:
    results = []
    for shard in (False, True):
        ar.config.passes["shard"] = shard
        trained = Trained(3, MAKERS["adam"], "float64")
        trained.run(2)
        trained.run(2, eagerly=True)
        trained.run(1)
        results.append(trained)
    _equal(*results)


@pytest.mark.parametrize(
    "off", ["prune", "fold", "simplify", "narrow", "fuse", "bucket", "plan_buffers"]
)
def test_the_bits_are_the_same_without_any_other_pass(off: str) -> None:
    ar.config.passes[off] = False
    try:
        both_ways(2, MAKERS["adam"], lambda trained: trained.run(3))
    finally:
        ar.config.passes[off] = True


@pytest.mark.parametrize("looks", ["enable_check_numerics", "enable_sync_errors"])
def test_the_bits_are_the_same_when_each_instruction_is_looked_at(looks: str) -> None:
    getattr(ar.config, looks)()
    both_ways(3, MAKERS["adam"], lambda trained: trained.run(3))


def check_overflow_is_named() -> None:
    """Have a bucket's sum overflow, and its error name the variable."""
    ar.config.enable_check_numerics()
    trained = Trained(2, lambda: ar.optim.SGD(1.0, momentum=0.5))
    huge = ar.Variable(np.zeros(5000, np.float32), name="m/huge", replicator=trained.strategy)

    @ar.function
    def step(x: Any) -> None:
        trained.optimizer.minimize(ar.ops.sum(x * huge, axis=1), [huge])

    batch = ar.PerReplica((np.full((1, 5000), 3e38, np.float32),) * 2)
    with pytest.raises(NumericsError, match="the sum of all replicas' gradients of 'm/huge'"):
        trained.strategy.run(step, args=(batch,))


def test_a_sum_that_is_not_finite_is_named() -> None:
    check_overflow_is_named()


def test_state_goes_from_one_way_to_the_other() -> None:
    def work(trained: Trained) -> None:
        trained.run(2)
        state = trained.optimizer.state()
        trained.run(1)
        trained.optimizer.load_state(state)
        loaded = trained.optimizer.state()
        for key, value in state.items():
            np.testing.assert_array_equal(loaded[key], value)
        trained.run(2)

    sliced = both_ways(3, MAKERS["adam"], work)
    ar.config.passes["shard"] = False
    plain = Trained(3, MAKERS["adam"])
    plain.optimizer.load_state(sliced.optimizer.state())
    plain.second.load_state(sliced.second.state())
    for mine, theirs in zip(plain.variables, sliced.variables, strict=True):
        mine.assign(theirs.numpy())
    plain.other.assign(sliced.other.numpy())
    for each in (plain, sliced):
        each.run(2)
    _equal(plain, sliced)


def test_an_error_in_a_step_leaves_the_state_that_was_before() -> None:
    def work(trained: Trained) -> None:
        trained.run(2)

        @ar.function
        def wrong(labels: Any) -> Any:
            return ar.ops.one_hot(labels, 3) * trained.other[0, 0]

        with pytest.raises(ar.UsageError, match="label 7"):
            trained.strategy.run(wrong, args=(ar.PerReplica((np.zeros(1, int), np.full(1, 7))),))
        before = trained.values()
        trained.run(0)
        for one, other in zip(trained.values(), before, strict=True):
            np.testing.assert_array_equal(one, other)
        trained.run(3)

    both_ways(2, MAKERS["adam"], work)


def test_another_optimizer_takes_variables_over() -> None:
    def work(trained: Trained) -> None:
        trained.run(2)
        third = ar.optim.SGD(0.1, momentum=0.5)

        @ar.function
        def step(x: Any) -> None:
            w1, b1, *_ = trained.variables
            third.minimize(ar.ops.sum(ar.ops.square(x @ w1 + b1), axis=1), [w1, b1])

        for _ in range(2):
            (batch,) = trained.strategy.distribute_dataset([(trained.x,)])
            trained.strategy.run(step, args=batch)
            trained.run(1)

    both_ways(2, MAKERS["adam"], work)


def test_what_replicas_that_are_closed_have_learned_is_still_known() -> None:
    def work(trained: Trained) -> None:
        trained.run(2)
        trained.strategy.close()

    both_ways(2, MAKERS["adam"], work)


def test_an_update_of_ones_own_is_done_plainly() -> None:
    class Own(ar.optim.SGD):
        def update(self, parameters: Any, gradients: Any, slots: Any, *rest: Any) -> None:
            super().update(parameters, -gradients, slots, *rest)

    trained = Trained(2, lambda: Own(0.01, momentum=0.5))
    before = trained.variables[0].numpy()
    trained.run(1)
    assert "update_slices" not in trained.operations
    upwards = trained.variables[0].numpy() - before
    other = Trained(2, lambda: ar.optim.SGD(0.01, momentum=0.5))
    other.run(1)
    assert "update_slices" in other.operations
    np.testing.assert_allclose(upwards, before - other.variables[0].numpy(), rtol=1e-3, atol=1e-6)


def test_slices_take_no_more_of_a_devices_memory() -> None:
    used = []
    for shard in (False, True):
        ar.config.passes["shard"] = shard
        with collector_off():
            before = lookup("CPU:1").memory.used
            trained = Trained(2, MAKERS["adam"])
            trained.run(1)
            used.append(lookup("CPU:1").memory.used - before)
            del trained
    assert used[0] == used[1]


def test_an_update_from_a_mixin_or_on_the_instance_is_the_one_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Still:
        def update(self, *_: object) -> None:
            """Change nothing."""

    class StillAdam(Still, ar.optim.Adam):
        pass

    for make in (StillAdam, lambda: ar.optim.Adam(0.01)):
        trained = Trained(2, make)
        if type(trained.optimizer) is ar.optim.Adam:
            monkeypatch.setattr(trained.optimizer, "update", Still().update)
        before = [np.asarray(each) for each in trained.variables]
        trained.strategy.run(trained.step, (trained.x,))
        for variable, was in zip(trained.variables, before, strict=True):
            np.testing.assert_array_equal(np.asarray(variable), was)
        trained.strategy.close()
