"""Steps that went wrong silently once, or could: each of these failed before its fix."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import DeviceError, NumericsError, ShapeError, UsageError
from allreduce.graph import load_optimizer_state, optimizer_state
from allreduce.graph.core import pytree


class Descent(ar.optim.SGD):
    """Gradient descent with momentum 0 kept in a slot, so that there is a state to look at."""

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__(rate, momentum=0.5)


def _weight(name: str = "w", value: float = 0.0) -> ar.Variable:
    return ar.Variable(np.full((1,), value, np.float32), name=name)


def _step(optimizer: ar.optim.Optimizer, *weights: ar.Variable) -> ar.graph.Function:
    @ar.function
    def step(x: ar.Tensor) -> None:
        loss = sum((ar.ops.sum(x * w, axis=1) for w in weights[1:]), ar.ops.sum(x * weights[0], 1))
        optimizer.minimize(loss, list(weights))

    return step


ONES = np.ones((4, 1), np.float32)


def test_two_optimizers_may_take_turns_on_one_variable() -> None:
    w = _weight()
    first, second = _step(ar.optim.SGD(1.0), w), _step(ar.optim.SGD(10.0), w)
    for step, expected in ((first, -1), (second, -11), (first, -12), (second, -22)):
        step(ONES)
        assert w.numpy() == expected


def test_models_may_share_variables() -> None:
    shared, a, b = _weight("shared"), _weight("a"), _weight("b")
    one, two = _step(ar.optim.SGD(1.0), shared, a), _step(ar.optim.SGD(1.0), shared, b)
    for step in (one, two, one, one, two):
        step(ONES)
    assert [float(v.numpy()[0]) for v in (shared, a, b)] == [-5, -3, -2]


def test_one_variable_is_updated_once_in_a_step() -> None:
    w = _weight()
    same, other = ar.optim.SGD(1.0), ar.optim.SGD(1.0)
    for again in (same, other):

        @ar.function
        def step(x: ar.Tensor, again: ar.optim.Optimizer = again) -> None:
            same.minimize(ar.ops.sum(x * w, axis=1), [w])
            again.minimize(ar.ops.sum(x * w, axis=1), [w])

        with pytest.raises(UsageError, match=r"'w' is updated twice.*add the losses up"):
            step(ONES)
    assert w.numpy() == 0


def test_threads_do_not_mix_their_steps() -> None:
    w = ar.Variable(np.random.default_rng(0).standard_normal((64, 64)), name="w")

    @ar.function
    def twice(x: ar.Tensor) -> ar.Tensor:
        return ar.ops.tanh(ar.ops.tanh(x @ w) @ w)

    wrong: list[int] = []

    def call(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(30):
            x = random.standard_normal((64, 64))
            expected = np.tanh(np.tanh(x @ w.numpy()) @ w.numpy())
            if not np.allclose(np.asarray(twice(x)), expected):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_builtins_do_not_share_a_program() -> None:
    add, multiply = ar.function(operator.add), ar.function(operator.mul)
    assert float(add(np.float32(2), np.float32(4))) == 6
    assert float(multiply(np.float32(2), np.float32(4))) == 8


def test_methods_belong_to_their_class_and_instance() -> None:
    class Base:
        __slots__ = ("__weakref__", "by")
        twice = ar.function(lambda self, x: x * 2)
        hundredfold = ar.function(lambda self, x: x * 100)

        def __init__(self, by: float) -> None:
            self.by = by

        @ar.function
        def step(self, x: ar.Tensor) -> ar.Tensor:
            return x * self.by

    class Derived(Base):
        @ar.function
        def step(self, x: ar.Tensor) -> object:
            return super().step(x) + 1

    one = np.ones(1)
    thing = Derived(2)
    assert float(thing.twice(one)) == 2
    assert float(thing.hundredfold(one)) == 100
    assert float(thing.step(one)) == 3
    changed = copy.copy(thing)
    changed.by = 5
    assert float(changed.step(one)) == 6


def test_gradients_see_every_value_that_was_read() -> None:
    a, b = _weight("a", 3.0), _weight("b", 2.0)
    optimizer = ar.optim.SGD(1.0)

    @ar.function
    def step(x: ar.Tensor) -> None:
        loss = ar.ops.sum(x * (a * b), axis=1)
        a.assign(ar.ops.clip(a, 0.0, 1.0))
        optimizer.minimize(loss, [a, b])

    step(ONES)
    assert a.numpy() == 1 - 2  # clipped, then moved by the gradient taken at 3
    assert b.numpy() == 2 - 3


@pytest.fixture
def strategy() -> Iterator[ar.MirroredStrategy]:
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    yield strategy
    strategy.close()


def test_replicas_may_not_be_assigned_their_own_samples(strategy: ar.MirroredStrategy) -> None:
    with strategy.scope():
        v, steps = _weight("v"), _weight("steps")
    (batch,) = strategy.distribute_dataset([np.ones((2, 1), np.float32)])
    with pytest.raises(UsageError, match=r"'v' .*samples.*strategy\.reduce"):
        strategy.run(lambda x: v.assign(ar.ops.mean(x, axis=0)), args=(batch,))
    strategy.run(lambda x: steps.assign(steps + 1), args=(batch,))
    assert [float(each[0]) for each in steps.storage] == [1, 1, 1]


def test_an_error_does_not_end_a_mirrored_strategy(strategy: ar.MirroredStrategy) -> None:
    with strategy.scope():
        w = ar.Variable(np.ones((1, 3), np.float32), name="w")
        optimizer = ar.optim.Adam(0.1)

    @ar.function
    def step(x: ar.Tensor, labels: ar.Tensor) -> None:
        loss = ar.nn.losses.sparse_categorical_crossentropy(labels, x @ w, from_logits=True)
        optimizer.minimize(loss, [w])

    right, wrong = strategy.distribute_dataset(
        [(np.ones((3, 1), np.float32), np.asarray(labels)) for labels in ([0, 1, 2], [0, 1, 9])]
    )
    strategy.run(step, args=right)
    before = w.numpy()
    with pytest.raises(UsageError, match="9"):
        strategy.run(step, args=wrong)
    np.testing.assert_array_equal(w.numpy(), before)
    strategy.run(step, args=right)
    assert optimizer.iterations == 2
    for array in w.storage:
        np.testing.assert_array_equal(array, w.storage[0])


def test_a_value_per_replica_is_not_taken_for_a_batch(strategy: ar.MirroredStrategy) -> None:
    (batch,) = strategy.distribute_dataset([np.ones((7, 2), np.float32)])
    sums = strategy.run(lambda x: ar.ops.sum(x, axis=0), args=(batch,))
    assert not sums.is_batch
    shifted = strategy.run(lambda x, s: x + s, args=(batch, sums))
    np.testing.assert_array_equal(shifted.values[0], np.full((3, 2), 4))
    np.testing.assert_array_equal(shifted.values[2], np.full((2, 2), 3))


def test_draws_depend_on_the_steps_of_their_own_function(strategy: ar.MirroredStrategy) -> None:
    def drop(x: ar.Tensor) -> ar.Tensor:
        return ar.ops.dropout(x, 0.5, seed=1)

    (batch,) = strategy.distribute_dataset([np.ones((6, 20), np.float32)])
    first = [strategy.gather(strategy.run(drop, args=(batch,))) for _ in range(2)]
    strategy.set_steps(drop, 0)
    again = []
    for _ in range(2):
        again.append(strategy.gather(strategy.run(drop, args=(batch,))))
        strategy.run(lambda x: x, args=(batch,))  # anything else in between
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])


def test_every_arena_counts_its_own_updates() -> None:
    a, b = _weight("a"), _weight("b")
    optimizer = Descent()
    first, second = _step(optimizer, a), _step(optimizer, b)
    for step in (first, first, first, second):
        step(ONES)
    assert optimizer.iterations == 3
    state = optimizer_state(optimizer)
    assert int(state["b/updates"]) == 1
    assert "a/updates" not in state
    twin = Descent()
    load_optimizer_state(twin, state)
    _step(twin, _weight("b"))(ONES)
    assert int(optimizer_state(twin)["b/updates"]) == 2


def test_a_state_is_checked() -> None:
    w, optimizer = _weight(), Descent()
    _step(optimizer, w)(ONES)
    state = optimizer_state(optimizer)
    with pytest.raises(UsageError, match="iterations"):
        load_optimizer_state(optimizer, {"w/velocity": np.zeros(1)})
    with pytest.raises(UsageError, match="w/m"):
        load_optimizer_state(optimizer, {**state, "w/m": np.zeros(1)})
    slot = next(key for key in state if key.startswith("w/"))
    with pytest.raises(ShapeError, match=slot):
        load_optimizer_state(optimizer, {**state, slot: np.zeros(3)})


def test_variables_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\['w'\] are used twice"):
        _step(Descent(), _weight("w"), _weight("w"))(ONES)


def test_a_concrete_tensor_keeps_its_value() -> None:
    w = ar.Variable(np.ones((2, 2), np.float32), name="w")
    view = ar.ops.transpose(w)
    w.assign(np.zeros((2, 2), np.float32))
    np.testing.assert_array_equal(view.numpy(), np.ones((2, 2)))


@pytest.mark.parametrize("weight", [float("nan"), -2.0, float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    w, optimizer = _weight(), ar.optim.SGD(1.0)

    @ar.function
    def step(x: ar.Tensor) -> None:
        optimizer.minimize(ar.ops.sum(x * w, axis=1), [w], weight=weight)

    with pytest.raises(NumericsError, match=str(weight)):
        step(ONES)
    assert w.numpy() == 0


def test_signatures_tell_apart_what_looks_alike() -> None:
    assert pytree.treedef([1]) != pytree.treedef((1,))

    @ar.function
    def scaled(x: ar.Tensor, by: object) -> ar.Tensor:
        return x * by

    results = [float(scaled(np.float64(1), by)) for by in (True, 1, 1.0, 0.0)]
    assert results == [1, 1, 1, 0]
    assert np.signbit(float(scaled(np.float64(1), -0.0)))

    @ar.function
    def place(x: ar.Tensor) -> ar.Tensor:
        return x + 1

    place(np.ones(1))
    with ar.device("GPU:7"), pytest.raises(DeviceError, match="GPU:7"):
        place(np.ones(1))
    with ar.device("GPU:7"), pytest.raises(DeviceError, match="GPU:7"):
        ar.ops.add(1.0, 2.0)


@pytest.mark.parametrize("wrong", [0, None, ["CPU:0"]])
def test_a_device_that_is_no_name_is_refused_where_it_is_given(wrong: object) -> None:
    with pytest.raises(DeviceError, match="is not a device name"), ar.device(wrong):  # type: ignore[arg-type]
        pytest.fail("the block was entered")
    assert ar.ops.sum(np.ones(3)).numpy() == 3  # and nothing of it is left


def test_wrong_calls_of_run_are_named(strategy: ar.MirroredStrategy) -> None:
    (batch,) = strategy.distribute_dataset([np.ones((3, 1))])
    with pytest.raises(UsageError, match="args of type ndarray"):
        strategy.run(lambda x: x, args=np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="args of type PerReplica"):
        strategy.run(lambda x: x, args=batch)
    with pytest.raises(UsageError, match="takes a function"):
        strategy.run(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="array of object"):
        strategy.run(lambda x: x, args=(np.asarray([object()]),))
    with pytest.raises(UsageError, match="one array per local replica"):
        ar.PerReplica(np.ones(3))  # type: ignore[arg-type]
