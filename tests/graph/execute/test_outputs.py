"""A step's results belong to the caller: later steps reuse their memory once it is unreferenced."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import ops
from allreduce.graph.core import pytree
from allreduce.graph.execute import bound_program
from allreduce.graph.execute.outputs import HostOutput

SHAPE = (200, 300)  # large enough not to be copied


def _inputs(count: int) -> list[np.ndarray]:
    return [np.full(SHAPE, each, "float32") for each in range(count)]


@pytest.fixture(params=["in Python", "native replay"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a function as a step; return its results as arrays."""
    if request.param == "in Python":
        monkeypatch.setattr(bound_program, "_MOST_REPLAYS", 0)
    strategy = ar.MirroredStrategy(["CPU:0"])

    def called(step: Any, *args: np.ndarray) -> Any:
        return pytree.map_leaves(lambda each: each.values[0], strategy.run(step, args=args))

    return called


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_who_keeps_all_results_has_them_as_they_were(run: Callable[..., Any]) -> None:
    step = ar.function(lambda x: x * 2 + 1)
    kept = [run(step, x) for x in _inputs(6)]
    for each, x in zip(kept, _inputs(6), strict=True):
        np.testing.assert_array_equal(each, x * 2 + 1)
    assert len({_address(each) for each in kept}) == 6


@pytest.mark.parametrize(
    "part",
    [
        lambda y: y[3:5, ::2],
        lambda y: y.reshape(-1).T[7:],
        memoryview,
        lambda y: np.from_dlpack(y)[1:],
        lambda y: np.asarray(memoryview(y[2]).cast("B")),
    ],
)
def test_so_has_who_keeps_a_part(run: Callable[..., Any], part: Callable[..., Any]) -> None:
    step = ar.function(lambda x: x * 2 + 1)
    kept = [(part(run(step, x)), part(x * 2 + 1)) for x in _inputs(5)]
    for each, expected in kept:
        np.testing.assert_array_equal(np.asarray(each), np.asarray(expected))


def test_a_result_is_fed_to_the_next_step(run: Callable[..., Any]) -> None:
    step = ar.function(lambda x: x + 1)
    x = _inputs(1)[0]
    places = set()
    for _ in range(8):
        x = run(step, x)
        places.add(_address(x))
    np.testing.assert_array_equal(x, np.full(SHAPE, 8, "float32"))
    assert len(places) == 2  # what is read is never what is written


def test_what_is_returned_twice_is_two_arrays(run: Callable[..., Any]) -> None:
    @ar.function
    def step(x: Any) -> Any:
        y = x * 2
        flat = ops.reshape(y, (-1,))
        return y, y, flat, ops.transpose(y, (1, 0)), y[5], y + 1

    for x in _inputs(5):
        made = run(step, x)
        expected = [2 * x, 2 * x, 2 * x.reshape(-1), 2 * x.T, 2 * x[5], 2 * x + 1]
        for i, each in enumerate(made):
            np.testing.assert_array_equal(each, expected[i])
            each[...] = -1
            expected[i] = np.full_like(each, -1)


@pytest.mark.parametrize("first", [0, 1])
def test_a_view_alone_is_returned(run: Callable[..., Any], first: int) -> None:
    @ar.function
    def step(x: Any) -> Any:
        y = x * 2
        return [ops.reshape(y, (-1, 100)), ops.transpose(y, (1, 0))][first], ops.sum(y)

    kept = [run(step, x) for x in _inputs(5)]
    for x, (view, total) in zip(_inputs(5), kept, strict=True):
        np.testing.assert_array_equal(view, [2 * x.reshape(-1, 100), 2 * x.T][first])
        assert total == 2 * x.sum()
        view[...] = 0  # it is the caller's own


def test_a_step_that_fails_leaves_earlier_results(run: Callable[..., Any]) -> None:
    @ar.function
    def step(x: Any, labels: Any) -> Any:
        y = x * 2
        return y, ar.nn.losses.sparse_categorical_crossentropy(labels, y, from_logits=True)

    labels = np.zeros(SHAPE[0], np.int64)
    kept = [run(step, x, labels)[0] for x in _inputs(3)]
    with pytest.raises(ar.UsageError, match="label 300"):
        run(step, _inputs(9)[8], labels + 300)
    kept += [run(step, x, labels)[0] for x in _inputs(3)]
    for x, each in zip(_inputs(3) * 2, kept, strict=True):
        np.testing.assert_array_equal(each, 2 * x)


def test_memory_that_nobody_has_is_taken_again(run: Callable[..., Any]) -> None:
    step = ar.function(lambda x: x * 2)
    x = _inputs(1)[0]
    places = [_address(run(step, x)) for _ in range(5)]
    assert len(set(places)) == 1
    kept = [run(step, x) for _ in range(4)]
    del kept  # of which one is kept for later steps
    again = [_address(run(step, x)) for _ in range(3)]
    assert len(set(again)) == 1


def test_what_a_handler_raises_is_not_lost_where_a_result_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ring(BaseException):
        pass

    def ring(*_: object) -> None:
        raise Ring

    lost: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda found: lost.append(found.exc_value))
    room = HostOutput(SHAPE, np.dtype("float32"))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                while not lost:
                    room.allocate()
            except Ring:
                continue
    finally:
        signal.signal(signal.SIGALRM, before)
    assert lost == []


def test_a_scan_keeps_its_own_memory(run: Callable[..., Any]) -> None:
    @ar.function
    def step(x: Any) -> Any:
        return ar.scan(lambda carry, each: (carry + each, carry), x * 0, ops.stack([x, x, x]))

    kept = [run(step, x) for x in _inputs(4)]
    for x, (last, before) in zip(_inputs(4), kept, strict=True):
        np.testing.assert_array_equal(last, 3 * x)
        np.testing.assert_array_equal(before, np.stack([0 * x, x, 2 * x]))
