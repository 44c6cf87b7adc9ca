"""`ar.scan` against Python's loop: values, gradients, batches, replicas, and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

import allreduce as ar
from allreduce import nn, optim
from allreduce.errors import NumericsError, ShapeError, UsageError
from allreduce.graph import Variable, function, gradients, ops, passes, scan
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core import pass_switches
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from tests.graph.interpret import interpret, record
from tests.graph.ops.test_gradients import numeric_gradients

FLOAT = np.dtype(np.float64)
RANDOM = np.random.default_rng(3)
XS = RANDOM.normal(size=(5, 2, 3))
H = RANDOM.normal(size=(2, 3))
W = RANDOM.normal(size=(3, 3))
untyped: Any = scan


@dataclass
class State:
    hidden: Any
    count: Any


def _nested(w: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        state, (slow, last) = carry["state"], carry["pair"]
        hidden = ops.tanh(state.hidden @ w + x["a"] + last)
        moved = State(hidden, state.count + 1)
        return {"state": moved, "pair": (last, slow)}, [hidden * 2, None, state.count]

    return step


def _start(h: Any) -> Any:
    return {"state": State(h, np.int64(0)), "pair": (h * 0.5, h * 0.25)}


def _by_hand(reverse: bool) -> tuple[np.ndarray, np.ndarray, list[int]]:
    hidden, slow, last = H, H * 0.5, H * 0.25
    rows, numbers = np.zeros_like(XS), [0] * len(XS)
    order = range(len(XS))
    for number, t in enumerate(reversed(order) if reverse else order):
        hidden = np.tanh(hidden @ W + XS[t] + last)
        slow, last = last, slow
        rows[t], numbers[t] = hidden * 2, number
    return hidden, rows, numbers


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_a_scan_is_a_loop(traced: bool, reverse: bool) -> None:
    def run(h: Any, xs: Any, w: Any) -> Any:
        return scan(_nested(w), _start(h), {"a": xs, "b": None}, reverse=reverse)

    strided = np.asfortranarray(XS)
    carry, (rows, nothing, numbers) = (function(run) if traced else run)(
        ops.cast(H, FLOAT), strided, W
    )
    hidden, wanted, counted = _by_hand(reverse)
    np.testing.assert_allclose(carry["state"].hidden, hidden, rtol=1e-12)
    np.testing.assert_allclose(rows, wanted, rtol=1e-12)
    assert nothing is None
    assert int(carry["state"].count) == len(XS)
    assert numbers.numpy().tolist() == counted
    np.testing.assert_array_equal(carry["pair"][0], H * 0.25)  # changed places five times
    np.testing.assert_array_equal(carry["pair"][1], H * 0.5)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_steps_without_elements(traced: bool, length: int) -> None:
    def run(start: Any) -> Any:
        return scan(lambda a, _: (a * 2.0, a), start, length=length)

    last, rows = (function(run) if traced else run)(np.ones(2))
    np.testing.assert_array_equal(last, np.full(2, 2.0**length))
    assert rows.shape == (length, 2)
    np.testing.assert_array_equal(rows, np.full((length, 2), 2.0 ** np.arange(length)[:, None]))


def _lossy(*inputs: Any, reverse: bool = False) -> Tensor:
    """Use all kinds of results, and a tensor from outside twice."""
    h, xs, w = inputs
    (last, unused, _), (rows, carried) = scan(
        lambda c, x: ((ops.tanh(c[0] @ w + x * w[0]), c[1], c[2] + 1), (c[0] * x, c[1])),
        (h, h + 1.0, np.int64(0)),
        xs,
        reverse=reverse,
    )
    return ops.sum(last**2) + ops.sum(rows * xs) + ops.sum(unused) + ops.sum(carried**2)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_gradients_agree_with_differences(length: int, reverse: bool) -> None:
    inputs = [H, XS[:length], W]
    specs = [Spec(x.shape, FLOAT) for x in inputs]
    forward = record(lambda *x: [_lossy(*x, reverse=reverse)], *specs)
    graph = record(lambda *x: backward(_lossy(*x, reverse=reverse), x, 1.0), *specs)
    for found in (interpret(graph, inputs), _ran(lambda *x: _gradients(x, reverse), inputs)):
        expected = numeric_gradients(forward, inputs, np.ones(()))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


def _gradients(x: Any, reverse: bool) -> Any:
    return gradients(_lossy(*x, reverse=reverse), list(x))


def _ran(run: Callable[..., Any], inputs: list[np.ndarray]) -> list[np.ndarray]:
    return [each.numpy() for each in function(run)(*inputs)]


def test_second_gradients_agree_with_differences() -> None:
    def first(*x: Tensor) -> Tensor:
        found = backward(_lossy(*x), x, 1.0)
        return ops.sum(found[0] ** 2) + ops.sum(found[1] * x[1]) + ops.sum(ops.sin(found[2]))

    inputs = [H, XS[:3], W]
    specs = [Spec(x.shape, FLOAT) for x in inputs]
    forward = record(lambda *x: [first(*x)], *specs)
    expected = numeric_gradients(forward, inputs, np.ones(()))
    found = _ran(lambda *x: gradients(first(*x), list(x)), inputs)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_scans_within_scans() -> None:
    def total(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        def row(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            inner, _ = scan(lambda c, y: (ops.tanh(c * y + ops.sum(w) + x[0]), None), carry, x)
            return inner, ops.sum(inner * h)

        last, sums = scan(row, xs[0, 0], xs)
        return ops.sum(last**2) + ops.sum(sums)

    inputs = [RANDOM.normal(size=3), XS, W]
    forward = record(lambda *x: [total(*x)], *(Spec(x.shape, FLOAT) for x in inputs))
    expected = numeric_gradients(forward, inputs, np.ones(()))
    found = _ran(lambda *x: gradients(total(*x), list(x)), inputs)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


class Recurrent(nn.Model):
    """A recurrent layer over `(batch, length, features)`, and what it says in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Dense(4, "tanh")
        self.last = nn.Dense(2, "softmax")

    def call(self, x: Tensor) -> Any:
        def step(h: Tensor, x: Tensor) -> tuple[Any, None]:
            return self.cell(ops.concatenate([x, h], axis=-1)), None

        steps = ops.transpose(x, (1, 0, 2))
        h, _ = scan(step, ops.zeros((x.shape[0], 4)), steps)
        return self.last(h)


def _fitted(model: Recurrent, epochs: int = 2) -> list[float]:
    x = np.random.default_rng(0).normal(size=(10, 6, 3)).astype(np.float32)
    y = (x[:, 0, 0] > 0).astype(int)
    model.compile(optim.Adam(0.05), "sparse_categorical_crossentropy")
    losses: list[float] = model.fit(
        x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0
    ).history["loss"]
    return losses


def test_a_recurrent_model_learns_on_one_replica_as_on_three() -> None:
    ar.set_seed(5)
    wanted = _fitted(Recurrent(), 8)
    assert wanted[-1] < 0.6 * wanted[0]
    strategy = MirroredStrategy([f"CPU:{i}" for i in range(3)])  # one without rows in each epoch
    with strategy.scope():
        ar.set_seed(5)
        model = Recurrent()
    np.testing.assert_allclose(_fitted(model, 8), wanted, rtol=1e-3)


def test_passes_go_inside_and_change_nothing() -> None:
    ar.set_seed(5)
    wanted = _fitted(Recurrent())
    try:
        for name in pass_switches.OPTIONAL:
            pass_switches.switch(name, False)
        ar.set_seed(5)
        np.testing.assert_allclose(_fitted(Recurrent()), wanted, rtol=1e-4)
    finally:
        for name in pass_switches.OPTIONAL:
            pass_switches.switch(name, True)


def test_what_nobody_reads_is_not_computed() -> None:
    def last(h: Tensor, xs: Tensor) -> list[Tensor]:
        return [scan(lambda c, x: (ops.sin(c) * 2.0 + x, (ops.exp(c), ops.log(c))), h, xs)[0]]

    graph = record(last, Spec((BATCH, 3), FLOAT), Spec((5, BATCH, 3), FLOAT))
    (node,) = (node for node in passes.optimize(graph).nodes if node.op == "scan")
    inside = [each.op for each in node.attrs["body"].graph.nodes]
    assert inside.count("fused") == 1
    assert not {"exp", "log"} & set(inside)


def test_the_operation_inside_that_makes_a_nan_is_named() -> None:
    ar.config.enable_check_numerics()
    try:
        run = function(lambda xs: scan(lambda c, x: (c + ops.log(x), None), np.zeros(2), xs)[0])
        run(np.ones((3, 2)))
        with pytest.raises(
            NumericsError, match=r"step 2: log at .*test_scanning\.py:\d+ made .* 1 NaN"
        ):
            run(np.array([[1.0, 1.0], [1.0, -1.0]]).repeat(2, axis=0)[:3])
    finally:
        ar.config.enable_check_numerics(False)


STEPS: tuple[tuple[Callable[..., Any], type[Exception], str], ...] = (
    (lambda c, x: (c[None], x), ShapeError, r"starts as float64\(3,\).* makes it float64\(1, 3\)"),
    (lambda c, x: (ops.cast(c, "float32"), x), UsageError, "starts as float64.* makes it float32"),
    (lambda c, x: ([c], x), UsageError, "another structure"),
    (lambda c, x: (None, x), UsageError, "makes it None"),
    (lambda c, x: c, UsageError, r"returns \(carry, results\)"),
    (lambda c, x: [c, x], UsageError, r"returns \(carry, results\)"),
)


@pytest.mark.parametrize(("step", "kind", "message"), STEPS)
@pytest.mark.parametrize("traced", [False, True])
def test_a_carry_stays_what_it_is(
    traced: bool, step: Callable[..., Any], kind: type[Exception], message: str
) -> None:
    def run(x: Any) -> Any:
        return scan(step, np.zeros(3), x)

    with pytest.raises(kind, match=message) as caught:
        (function(run) if traced else run)(np.zeros((2, 3)))
    assert type(caught.value) is kind
    assert "test_scanning.py:" in str(caught.value)


def test_what_a_step_cannot_do_is_refused() -> None:
    variable = Variable(np.zeros(3), name="counter")

    def changing(x: Tensor) -> Tensor:
        variable.assign(x)
        return x

    def printing(x: Tensor) -> Tensor:
        ar.print(x)
        return x

    def refused(step: Callable[..., Any], message: str) -> None:
        def traced(x: Any) -> Any:
            return scan(lambda c, x: (c + step(x), None), np.zeros(3), x)[0]

        with pytest.raises(UsageError, match=message):
            function(traced)(np.zeros((2, 3)))

    refused(changing, "changes something outside .assign.; return")
    refused(printing, "changes something outside .print.")
    refused(lambda x: ops.dropout(x, 0.5), "draws random numbers, .* draw them before")
    with pytest.raises(UsageError, match=r"exchanges values between replicas .all_reduce."):
        MirroredStrategy(["CPU:0", "CPU:1"]).run(
            lambda x: scan(lambda c, _: (ar.all_reduce(c), None), x, length=2)[0], (np.zeros(3),)
        )


def test_numpys_bools_and_integers_are_taken() -> None:
    xs = np.array([1.0, 2.0])
    _, kept = untyped(lambda c, x: (c + x, c), np.float64(0), xs, np.int64(2), np.True_)
    assert kept.numpy().tolist() == [2.0, 0.0]


def test_arguments_that_do_not_fit_are_refused() -> None:
    def kept(carry: Any, x: Any) -> tuple[Any, None]:
        return carry, None

    with pytest.raises(UsageError, match="needs length="):
        scan(kept, np.zeros(3))
    with pytest.raises(ShapeError, match="lengths 2 and 3 together"):
        scan(kept, np.zeros(3), (np.zeros(2), np.zeros(3)))
    with pytest.raises(ShapeError, match="lengths 5 and 2 together"):
        scan(kept, np.zeros(3), np.zeros(2), length=5)
    with pytest.raises(UsageError, match="takes a function"):
        untyped(np.zeros(3), kept, np.zeros(2))
    with pytest.raises(UsageError, match=r"is an integer from 0, not 2\.0"):
        untyped(kept, np.zeros(3), length=2.0)
    with pytest.raises(UsageError, match="reverse is True or False, not 'no'"):
        untyped(kept, np.zeros(3), length=2, reverse="no")
    with pytest.raises(ShapeError, match=r"known: \(batch, 2\); transpose a batch"):
        MirroredStrategy(["CPU:0", "CPU:1"]).run(
            lambda x: scan(kept, np.zeros(2), x)[0],
            (
                next(
                    iter(MirroredStrategy(["CPU:0", "CPU:1"]).distribute_dataset([np.ones((4, 2))]))
                ),
            ),
        )
