"""Optimizer updates against NumPy; kernels give the same bits at every level and split."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest

from allreduce import _native
from allreduce.optim import SGD, Adam
from allreduce.optim.registry import TABLE, optimizer_class

N = 1003  # no multiple of any vector's width
DTYPES = ["float32", "float64"]
LOSS = "softmax_cross_entropy"
OPTIMIZERS: list[Any] = [optimizer_class(name) for name in TABLE]  # each has a native kernel


def _arrays(dtype: str, count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.normal(size=N).astype(dtype) for _ in range(count)]


def _adam(
    value: np.ndarray, gradient: np.ndarray, m: np.ndarray, v: np.ndarray, count: Any, step: int
) -> None:
    _native.apply_rule("adam", value, gradient, [m, v], count, Adam(0.01).numbers(step))


def test_adam_follows_its_paper() -> None:
    (value, gradient), m, v = _arrays("float64", 2), np.zeros(N), np.zeros(N)
    expected, mean, square = value.copy(), np.zeros(N), np.zeros(N)
    for step in range(1, 6):
        sums = gradient * step
        _adam(value, sums, m, v, np.array([4.0]), step)
        g = sums / 4
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * g * g
        # The form with epsilon-hat at the end of the paper's section 2, as Keras has it.
        rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        expected -= rate * mean / (np.sqrt(square) + 1e-7)
    np.testing.assert_allclose(value, expected, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(m, mean, rtol=1e-13)
    np.testing.assert_allclose(v, square, rtol=1e-13)


def test_adam_in_float32_keeps_the_precision_of_one_minus_beta() -> None:
    value, gradient, m, v = (np.full(1, x, np.float32) for x in (0, 1, 0, 0))
    _adam(value, gradient, m, v, np.ones(1, np.float32), 1)
    assert m[0] == np.float32(0.1)
    assert v[0] == np.float32(0.001)
    np.testing.assert_allclose(value, [-0.01], rtol=1e-5)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_follows_its_definition(momentum: float, nesterov: bool) -> None:
    value, gradient = _arrays("float64", 2)
    slots = [np.zeros(N)] if momentum else []
    expected, moving = value.copy(), np.zeros(N)
    for _ in range(3):
        numbers = SGD(0.1, momentum, nesterov).numbers(1)
        _native.apply_rule("sgd", value, gradient, slots, np.array([8.0]), numbers)
        g = gradient / 8
        moving = momentum * moving - 0.1 * g
        expected += momentum * moving - 0.1 * g if nesterov else moving
    np.testing.assert_allclose(value, expected, rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_samples_count_as_a_gradient_of_zero(dtype: str) -> None:
    value, gradient, m, v = _arrays(dtype, 4)
    gradient[::2] = np.nan  # what a buffer may hold that nobody wrote
    before, v = value.copy(), v * v
    _native.apply_rule("sgd", value, gradient, [], np.zeros(1, dtype), SGD(0.1).numbers(1))
    np.testing.assert_array_equal(value, before)
    zeros, no_samples = np.zeros(N, dtype), np.zeros(1, dtype)
    one, other = ([x.copy() for x in (value, m, v)] for _ in range(2))
    _adam(one[0], gradient, one[1], one[2], no_samples, 2)
    _adam(other[0], zeros, other[1], other[2], np.ones(1, dtype), 2)
    np.testing.assert_array_equal(one, other)


def _run_adam(arrays: list[np.ndarray], part: slice, count: np.ndarray) -> None:
    value, gradient, m, v = (x[part] for x in arrays)
    _adam(value, gradient, m, v, count, 3)


def _run_sgd(arrays: list[np.ndarray], part: slice, count: np.ndarray) -> None:
    value, gradient, velocity, _ = (x[part] for x in arrays)
    numbers = SGD(0.1, 0.9, True).numbers(1)
    _native.apply_rule("sgd", value, gradient, [velocity], count, numbers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("run", [_run_adam, _run_sgd])
def test_updates_do_not_depend_on_where_ranges_end(run: Callable[..., None], dtype: str) -> None:
    start = _arrays(dtype, 4)
    start[3] = start[3] ** 2
    count = np.full(1, 3, dtype)
    whole, parts = ([x.copy() for x in start] for _ in range(2))
    run(whole, slice(None), count)
    cuts = [0, 1, 3, 10, 33, 34, 500, 997, N]
    for a, b in pairwise(cuts):
        run(parts, slice(a, b), count)
    np.testing.assert_array_equal(whole, parts)
    assert not np.array_equal(whole[0], start[0])


@pytest.fixture
def levels() -> Iterator[list[int]]:
    """The instruction sets that this processor has, baseline first; restores the best."""
    yield [level for level in range(3) if _native.use_level(level)]
    _native.use_level(-1)


def _every_rule(dtype: str) -> list[np.ndarray]:
    """Give what the optimizers' kernels compute in two steps."""
    value, gradient, _, _ = _arrays(dtype, 4)
    count, results = np.full(1, 3, dtype), []
    given = {"momentum": 0.9, "weight_decay": 0.1, "centered": True}
    for kind in OPTIMIZERS:
        names = inspect.signature(kind).parameters
        for some in ({}, {name: each for name, each in given.items() if name in names}):
            made, updated = kind(0.01, **some), value.copy()
            slots = [np.full_like(value, 0.1) for _ in made.slots]
            for step in (1, 2):
                numbers = made.numbers(step)
                _native.apply_rule(made.kernel, updated, gradient, slots, count, numbers)
            results += [updated, *slots]
    return results


def _every_row_operator(dtype: str) -> dict[str, list[np.ndarray]]:
    """Give what each row operator computes, by name, from rows of two lengths."""
    a, b = _arrays(dtype, 2)
    results: dict[str, list[np.ndarray]] = {}

    def run(name: str, out: np.ndarray, inputs: Any, numbers: Any = ()) -> np.ndarray:
        made = np.empty_like(out)
        assert _native.run_rows(name, made, inputs, list(numbers)) == -1
        results.setdefault(name, []).append(made)
        return made

    for columns in (17, 59):  # 1003 = 17 * 59
        x, rows = b.reshape(-1, columns) * 9, N // columns
        labels, dy = np.arange(rows) % columns, a[:rows].copy()
        run(f"sparse_{LOSS}", dy, [labels, x])
        run(f"sparse_{LOSS}_gradient", x, [dy, labels, x])
        run(LOSS, dy, [x**2, x])
        run(f"{LOSS}_gradient", x, [dy, x**2, x])
        run("dropout", x, [x, np.array(11), np.array(7)], [0.4, 2**63 + 5, 1])
        run("erf", x, [x])
        shares = run("softmax", x, [x])
        normal = run("normalize", x, [x], [1e-5])
        run("normalize_gradient", x, [shares, x, normal], [1e-5])
    return results


def test_every_row_operator_is_tested() -> None:
    assert set(_every_row_operator("float32")) == set(_native.row_operators())


def _every_kernel(dtype: str) -> list[np.ndarray]:
    return [*_every_rule(dtype), *chain.from_iterable(_every_row_operator(dtype).values())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_levels_give_the_same_bits(levels: list[int], dtype: str) -> None:
    found = []
    for level in levels:
        assert _native.use_level(level)
        found.append([result.tobytes() for result in _every_kernel(dtype)])
    assert all(results == found[0] for results in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 5, 16, 59])
def test_rows_are_normalized(levels: list[int], dtype: str, columns: int) -> None:
    x, dy = (each[: 10 * columns].reshape(2, 5, columns) * 9 for each in _arrays(dtype, 2))
    x[0, 0] += 1000  # whose exponentials are infinite, and squares much larger than the variance
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-3)
    exponentials = np.exp(wide - wide.max(-1, keepdims=True))
    shares, normal, slopes = (np.empty_like(x) for _ in range(3))
    _native.run_rows("softmax", shares, [x])
    _native.run_rows("normalize", normal, [x], [1e-3])
    _native.run_rows("normalize_gradient", slopes, [dy, x, normal], [1e-3])
    rtol, atol = (1e-3, 1e-4) if dtype == "float32" else (1e-9, 1e-12)
    expected = exponentials / exponentials.sum(-1, keepdims=True)
    np.testing.assert_allclose(shares, expected, rtol, atol)
    y = centred / deviation
    np.testing.assert_allclose(normal, y, rtol, atol)
    along = (dy * y).mean(-1, keepdims=True)
    expected = (dy - dy.mean(-1, keepdims=True) - y * along) / deviation
    np.testing.assert_allclose(slopes, expected, rtol, 10 * atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [512, 513, 1536, 5000, 65536])
def test_long_rows_are_added_up_as_well_as_numpy_does(
    levels: list[int], dtype: str, columns: int
) -> None:
    x = np.random.default_rng(columns).uniform(1, 2, (4, columns)).astype(dtype)
    normal, shares = np.empty_like(x), np.empty_like(x)
    _native.run_rows("normalize", normal, [x], [1e-3])
    _native.run_rows("softmax", shares, [x])
    wide = x.astype(np.longdouble)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-3)
    # Means of so many numbers from 1 to 2 are off by few units in the last place.
    unit = float(np.finfo(dtype).eps)
    assert np.abs(normal - expected).max() < 7 * unit  # lanes alone: 14
    np.testing.assert_allclose(shares.sum(-1, dtype=np.longdouble), 1, rtol=2 * unit)


def test_wrong_arrays_are_refused() -> None:
    x, count = np.zeros(4, np.float32), np.ones(1, np.float32)
    empty = np.zeros((0, 0), np.float32)
    with pytest.raises(ValueError, match="different sizes"):
        _native.run_rows("erf", x, [x[:3]])
    with pytest.raises(ValueError, match="different sizes"):
        _native.apply_rule("sgd", x, x.copy(), [x[:3].copy()], count, [0.1, 0.9, 0.0])
    with pytest.raises(ValueError, match="different sizes"):
        _native.run_rows("normalize_gradient", x, [x[:3].copy(), x, x], [1e-3])
    with pytest.raises(ValueError, match="number of settings"):
        _native.run_rows("normalize", x, [x])
    with pytest.raises(ValueError, match="number of arrays"):
        _native.run_rows("softmax", x, [x, x])
    with pytest.raises(ValueError, match="without elements"):
        _native.run_rows(LOSS, x[:0], [empty, empty])
    with pytest.raises(ValueError, match="adam takes another number of slots"):
        _native.apply_rule("adam", x, x.copy(), [x.copy()], count, [0.1])
    with pytest.raises(ValueError, match="no optimizer's kernel is called adamx"):
        _native.apply_rule("adamx", x, x.copy(), [], count, [0.1])
    with pytest.raises(ValueError, match="not contiguous"):
        _native.run_rows("erf", x[::2], [x[::2]])
    with pytest.raises(ValueError, match="different types"):
        _native.run_rows("erf", x.astype(np.float64), [x])
    with pytest.raises(ValueError, match="float32 or float64"):
        _native.run_rows("erf", x.astype("float16"), [x])
    with pytest.raises(KeyError, match="none"):
        _native.run_rows("none", x, [x])
