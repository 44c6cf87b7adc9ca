"""Traced functions, concrete tensors and variables, on a single replica."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from allreduce.devices import options
from allreduce.errors import ShapeError, UsageError
from allreduce.graph import (
    Function,
    PerReplica,
    Tensor,
    Variable,
    apply_gradients,
    default_replicator,
    device,
    function,
    gradients,
    load_optimizer_state,
    minimize,
    ops,
    optimizer_state,
)
from allreduce.graph.core.tensor import ConcreteTensor
from allreduce.graph.update.update import UpdateRule


class Descent(UpdateRule):
    """Plain gradient descent, which also keeps the last mean gradient in a slot."""

    slots = ("last",)

    def __init__(self, rate: float = 0.5) -> None:
        self.rate = rate
        self.iterations = 0

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def native(self, header: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        return None

    def update(
        self,
        parameters: np.ndarray,
        gradients: np.ndarray,
        slots: Mapping[str, np.ndarray],
        count: np.ndarray,
        step: int,
    ) -> None:
        slots["last"][...] = gradients / count[0]
        parameters -= self.rate * slots["last"]


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_a_function_is_traced_once_per_signature() -> None:
    traces = []

    @function
    def double(x: Tensor, times: int = 2) -> Tensor:
        traces.append(x.shape)
        return x * times

    np.testing.assert_array_equal(double(np.ones(3)).numpy(), 2 * np.ones(3))
    double(np.zeros(3))
    double(np.zeros(4))
    double(np.zeros(3), times=3)
    assert traces == [(3,), (4,), (3,)]


def test_a_smaller_last_batch_needs_no_new_trace() -> None:
    traces = []

    @function
    def total(x: Tensor) -> Tensor:
        traces.append(str(x.spec))
        return ops.sum(x, axis=1)

    replicator = default_replicator()
    for rows in (5, 3, 0, 5):
        result = replicator.run(total, (PerReplica((np.ones((rows, 2), np.float32),)),))
        np.testing.assert_array_equal(result.values[0], np.full(rows, 2, np.float32))
        assert result.weights == (rows,)
    assert traces == ["float32(batch, 2)"]


def test_structures_come_back_as_they_were() -> None:
    @function
    def many(pair: tuple[Tensor, dict[str, Tensor]]) -> dict[str, object]:
        return {"sum": pair[0] + pair[1]["b"], "rest": [pair[0], None]}

    result = many((np.ones(2), {"b": np.ones(2)}))
    np.testing.assert_array_equal(result["sum"].numpy(), [2, 2])
    np.testing.assert_array_equal(result["rest"][0].numpy(), [1, 1])
    assert result["rest"][1] is None


def test_methods_are_traced_per_instance() -> None:
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        @function
        def __call__(self, x: Tensor) -> Tensor:
            return x * self.by

    assert Scale(2.0)(np.ones(1)).numpy() == 2
    assert Scale(3.0)(np.ones(1)).numpy() == 3


def test_outside_of_functions_operators_run_at_once() -> None:
    tensor = ops.exp(np.zeros(2)) + 1
    np.testing.assert_array_equal(tensor.numpy(), [2, 2])
    assert isinstance(tensor, ConcreteTensor)
    assert str(tensor.device) == "/job:worker/replica:0/task:0/device:CPU:0"
    assert float(ops.sum(tensor)) == 4


@pytest.mark.parametrize("use", [bool, float, int, len, list, np.asarray])
def test_a_traced_tensor_has_no_value(use: object) -> None:
    @function
    def fn(x: Tensor) -> object:
        return use(ops.sum(x))  # type: ignore[operator]

    with pytest.raises(UsageError, match=r"test_function\.py:\d+"):
        fn(np.ones(2))


def test_a_tensor_kept_from_a_trace_is_refused() -> None:
    kept: list[Tensor] = []

    @function
    def leak(x: Tensor) -> Tensor:
        kept.append(x + 1)
        return x

    leak(np.ones(2))
    with pytest.raises(UsageError, match="after its trace had ended"):
        ops.exp(kept[0])

    @function
    def other(x: Tensor) -> Tensor:
        return x + kept[0]

    with pytest.raises(UsageError, match="another traced function"):
        other(np.ones(2))


def test_shape_errors_name_the_users_line() -> None:
    @function
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    with pytest.raises(ShapeError, match=r"test_function\.py:\d+: matmul.*\(2, 3\).*\(2, 3\)"):
        fn(np.ones((2, 3)), np.ones((2, 3)))


def test_minimize_divides_the_sum_by_the_number_of_samples() -> None:
    w = Variable(np.zeros((2, 1), np.float64), name="w")
    rule = Descent()
    x, y = _floats(6, 2).astype(np.float64), _floats(6, 1).astype(np.float64)

    @function
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = ops.sum(ops.square(x @ w - y), axis=1)
        minimize(rule, loss, [w])
        return loss

    expected = -0.5 * (2 * x.T @ (-y)) / 6
    step(x, y)
    np.testing.assert_allclose(w.numpy(), expected)
    assert rule.iterations == 1


@pytest.mark.parametrize("weight", [None, 3.0])
def test_scalar_and_per_sample_losses_agree(weight: float | None) -> None:
    x = _floats(5, 2)
    steps = []
    for reduce in (False, True):
        w = Variable(np.ones((2, 1), np.float32), name="w")

        @function
        def step(x: Tensor, reduce: bool = reduce, w: Variable = w) -> None:
            loss = ops.sum(ops.square(x @ w), axis=1)
            scale = 1.0 if weight is None else 5 / weight
            minimize(Descent(), ops.mean(loss) * scale if reduce else loss, [w], weight=weight)

        default_replicator().run(step, (PerReplica((x,)),))
        steps.append(w.numpy())
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-5)


def test_local_gradients_can_be_clipped_and_applied() -> None:
    w = Variable(np.ones(3, np.float32), name="w")

    @function
    def step(x: Tensor) -> Tensor:
        (gradient,) = gradients(ops.sum(x * w, axis=1), [w])
        apply_gradients(Descent(1.0), [ops.clip(gradient, -0.1, 0.1)], [w])
        return gradient

    x = np.asarray([[1, 2, 0.05], [3, 2, 0.05]], np.float32)
    np.testing.assert_allclose(step(x).numpy(), [2, 2, 0.05], rtol=1e-6)
    np.testing.assert_allclose(w.numpy(), [0.9, 0.9, 0.95], rtol=1e-6)


def test_reads_before_and_after_a_step_see_what_was_there_then() -> None:
    w = Variable(np.ones(2, np.float32), name="w")

    @function
    def step(x: Tensor) -> tuple[object, object]:
        before = w * 1.0
        minimize(Descent(), ops.sum(x * w, axis=1), [w])
        return before, w * 1.0

    before, after = step(np.ones((4, 2), np.float32))
    np.testing.assert_array_equal(before.numpy(), [1, 1])
    np.testing.assert_array_equal(after.numpy(), [0.5, 0.5])


def test_returning_a_variable_returns_the_value_before_the_step() -> None:
    w = Variable(np.ones(2, np.float32), name="w")

    @function
    def step(x: Tensor) -> object:
        result = w.__tensor__()
        minimize(Descent(), ops.sum(x * w, axis=1), [w])
        return result

    np.testing.assert_array_equal(step(np.ones((4, 2), np.float32)).numpy(), [1, 1])
    np.testing.assert_array_equal(w.numpy(), [0.5, 0.5])


def test_a_counter_counts_in_steps_without_samples_too() -> None:
    counter = Variable(np.zeros((), np.int64), name="counter")

    @function
    def step(x: Tensor) -> Tensor:
        counter.assign(counter + 1)
        return x

    for rows in (3, 0):
        default_replicator().run(step, (PerReplica((np.ones((rows, 1)),)),))
    assert int(counter.numpy()) == 2


def test_a_step_on_two_devices_computes_the_same() -> None:
    w = Variable(_floats(3, 3), name="w")

    @function
    def split(x: Tensor) -> Tensor:
        y = ops.tanh(x @ w)
        with device("CPU:1"):
            z = y @ w
        return z + y

    x = _floats(4, 3)
    hidden = np.tanh(x @ w.numpy())
    np.testing.assert_allclose(split(x).numpy(), hidden @ w.numpy() + hidden, rtol=1e-6)


def test_optimizer_state_goes_out_and_in() -> None:
    def make() -> tuple[Variable, Descent, Function]:
        w, rule = Variable(np.ones(2, np.float32), name="w"), Descent()

        @function
        def step(x: Tensor) -> None:
            minimize(rule, ops.sum(x * w, axis=1), [w])

        return w, rule, step

    _, first, step = make()
    step(np.ones((3, 2), np.float32))
    state = optimizer_state(first)
    assert set(state) == {"w/last", "iterations"}
    _, second, again = make()
    load_optimizer_state(second, state)
    assert second.iterations == 1
    np.testing.assert_array_equal(optimizer_state(second)["w/last"], state["w/last"])
    again(np.ones((3, 2), np.float32))
    assert second.iterations == 2


def test_wrong_use_is_named() -> None:
    w, count = Variable(np.ones(2, np.float32), name="w"), Variable([1, 2], name="count")
    half = Variable(np.ones(2, np.float16), name="half")
    with pytest.raises(UsageError, match=r"inside ar\.function"):
        minimize(Descent(), np.ones(2), [w])

    def fail(body: object, match: str, error: type[Exception] = UsageError) -> None:
        with pytest.raises(error, match=match):
            function(body)(np.ones((2, 2), np.float32))  # type: ignore[arg-type]

    fail(lambda x: minimize(Descent(), ops.sum(x * w, axis=1), [w, w]), "'w' is given twice")
    fail(lambda x: minimize(Descent(), ops.sum(x, axis=1), [w]), "does not depend on any")
    fail(lambda x: minimize(Descent(), ops.sum(x * w, axis=1), []), "no variables")
    fail(lambda x: minimize(Descent(), ops.sum(x * half, axis=1), [half]), "'half' is float16; opt")
    fail(lambda x: w.assign(x), r"'w' has shape \(2,\)", ShapeError)
    fail(lambda x: count.assign(ops.sum(x, axis=0)), "'count' is int64; a float32 value")
    bare: list[Variable] = w  # type: ignore[assignment]
    fail(lambda x: minimize(Descent(), ops.sum(x * w, axis=1), bare), "list of variables, got Var")

    def labels(x: Tensor) -> Tensor:
        return ops.cast(ops.argmax(x * w, axis=1), "float32")

    fail(lambda x: minimize(Descent(), labels(x), [w]), "operator 'argmax' at .* passes none on")


def test_variables_hold_what_steps_can_compute_with() -> None:
    with pytest.raises(UsageError, match=r"'x' cannot hold (float128|float96); there are float64"):
        Variable(np.ones(2, np.longdouble), name="x")
    with pytest.raises(UsageError, match="'x' cannot hold <U3; there are"):
        Variable("abc", name="x")
    with pytest.raises(UsageError, match="a variable's name is text, not 3"):
        Variable(1.0, name=3)  # type: ignore[arg-type]
    first, second = Variable(1.0), Variable(2.0)
    assert first.name != second.name  # optimizers tell them apart by name


def test_a_traced_function_is_forgotten_with_its_owner() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.traces = 0

        def double(self, x: Tensor) -> Tensor:
            self.traces += 1
            return x * 2

    replicator = default_replicator()
    owner = Unhashable()
    for _ in range(2):
        replicator.run(owner.double, (PerReplica((np.ones((1, 2)),)),))
    assert owner.traces == 1
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


SIZE = r"test_function\.py:\d+: the size batch is known only .*; ar\.ops\.size\(x, axis\)"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda x: x / x.shape[0], "the size batch is known only when the step runs; ar.ops.size"),
        (lambda x: range(x.shape[0]), f"{SIZE} gives it as a tensor"),
        (lambda x: x.shape[0] * x, SIZE),
        (lambda x: 1 / x.shape[0], SIZE),
        (lambda x: x.shape[0] - 1, SIZE),
        (lambda x: 0.5 * x.shape[0] // 2, SIZE),
        (lambda x: x if x.shape[0] > 1 else -x, SIZE),
        (lambda x: ops.one_hot(np.zeros(2, int), x.shape[0]), SIZE),
        (lambda x: x.mean(), r"a tensor has no attribute 'mean'; use ar\.ops\.mean\(x\)"),
        (lambda x: x.colour, "a tensor has no attribute 'colour'$"),
        (lambda x: x[x > 0], "a mask's result has a size that is not known; use ar.ops.where"),
        (lambda x: np.linalg.norm(x), r"np\.linalg\.norm has no operator"),
        (lambda x: np.sin(x, out=np.zeros(2)), r"np\.sin inside ar\.function makes a new tensor"),
    ],
)
def test_what_a_traced_tensor_cannot_do_is_said_with_the_remedy(write: Any, said: str) -> None:
    batch = PerReplica((np.ones(2),))
    with pytest.raises((UsageError, ShapeError, TypeError, AttributeError), match=said):
        default_replicator().run(write, (batch,))


def test_arguments_that_do_not_fit_the_functions_parameters_are_refused() -> None:
    @function
    def add(a: Any, b: Any) -> Any:
        return a + b

    for eagerly in (True, False):
        options.run_functions_eagerly(eagerly)
        with pytest.raises(UsageError, match=r"test_function.py:\d+: .*add.* argument: 'b'"):
            add(np.ones(2))


def test_a_coroutine_is_no_step() -> None:
    async def step(x: Any) -> Any:
        return x

    for each in (step, functools.partial(step, 1)):
        with pytest.raises(UsageError, match=r"step.* is a coroutine; write def"):
            function(each)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"name": ""}, "name is text, not ''"), ({"trainable": "no"}, "True or False, not 'no'")],
)
def test_options_of_a_variable_are_checked(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Variable(np.zeros(2), **given)


@pytest.mark.parametrize("weights", [3, (-1,), ("a",)])
def test_weights_are_numbers_of_samples(weights: Any) -> None:
    with pytest.raises(UsageError, match="weights as a tuple with a number of samples per local"):
        PerReplica((np.ones(2),), weights)
