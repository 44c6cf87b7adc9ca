"""Chains of element-wise operations against NumPy: the same bits at every level."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from allreduce import _native

FLOATS = ["float32", "float64"]
NUMBERS = [*FLOATS, "int32", "int64"]
UNARY = ["negative", "absolute", "sign", "square"]
OF_FLOATS = ["sqrt", "isfinite", "isnan", "isinf"]
BINARY = ["add", "subtract", "multiply", "maximum", "minimum"]
COMPARISONS = ["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"]
LOGIC = ["logical_and", "logical_or", "logical_xor"]
# Around the widths of vectors and of tiles, and past the size from which results are streamed.
LENGTHS = [0, 1, 15, 63, 383, 384, 385, 2047, 2049, 5000, (1 << 20) + 3]


@pytest.fixture(params=range(3))
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    if not _native.use_level(request.param):
        pytest.skip("this processor has no such instructions")
    yield request.param
    _native.use_level(-1)


def _array(dtype: str, shape: Any, seed: int = 0) -> np.ndarray:
    """Numbers with NaN, infinities, both zeros and subnormal ones among them."""
    generator = np.random.default_rng(seed)
    if dtype == "bool":
        return np.asarray(generator.random(shape) < 0.5)
    array: np.ndarray = (generator.normal(size=shape) * 100).astype(dtype)
    if array.dtype.kind == "f":
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 1.0], dtype)
        chosen = generator.random(shape) < 0.2
        array = np.where(chosen, generator.choice(special, shape), array).astype(dtype)
    return array


Row = tuple[str, list[int], str]


def _run(rows: Sequence[Row], inputs: Sequence[np.ndarray], shape: Any = None) -> np.ndarray:
    links = [(op, reads, np.dtype(dtype).num, room) for room, (op, reads, dtype) in enumerate(rows)]
    chain = _native.chain(links, [x.dtype.num for x in inputs])
    assert chain is not None, rows
    wanted = np.broadcast_shapes(*(x.shape for x in inputs)) if shape is None else shape
    out = np.empty(wanted, rows[-1][2])
    assert chain.run(out, list(inputs))
    return out


def _same(one: np.ndarray, other: Any) -> None:
    """Compare bits; one NaN is like another."""
    other = np.asarray(other)
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)
    if one.dtype.kind == "f":
        numbers = ~np.isnan(one)
        np.testing.assert_array_equal(np.signbit(one)[numbers], np.signbit(other)[numbers])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("level")
def test_a_long_chain_has_numpys_bits(length: int, dtype: str) -> None:
    x, y = _array(dtype, length, 1), _array(dtype, length, 2)
    two = np.array(2, dtype)
    rows = [
        ("multiply", [0, 2], dtype),
        ("subtract", [1, -1], dtype),  # what is passed on stands on the right
        ("add", [-2, 0], dtype),
        ("divide", [-3, -2], dtype),  # the second is read twice
        ("square", [-4], dtype),
        ("add", [-5, -5], dtype),
        ("maximum", [-6, 1], dtype),
        ("divide", [2, -7], dtype),
    ]
    with np.errstate(all="ignore"):
        second = y - x * two
        expected = two / np.maximum(2 * np.square((second + x) / second), y)
    _same(_run(rows, [x, y, two]), expected)


ARITHMETIC = ["add", "subtract", "multiply", "divide"]
# Whether a number is repeated as the second and as the third operand of two operations.
REPEATED = [(False, False), (True, False), (False, True), (True, True)]


def _pair(first: str, second: str, is_right: bool, inputs: Sequence[np.ndarray]) -> None:
    dtype, (x, y, z) = inputs[0].dtype.name, inputs
    links = [(first, [0, 1], dtype), (second, [2, -1] if is_right else [-1, 2], dtype)]
    made = getattr(np, first)(x, y)
    expected = getattr(np, second)(z, made) if is_right else getattr(np, second)(made, z)
    _same(_run(links, inputs), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.usefixtures("level")
def test_two_operations_have_numpys_bits(dtype: str, is_right: bool) -> None:
    for repeats in REPEATED:
        y, z = (_array(dtype, () if each else 803, 1 + i) for i, each in enumerate(repeats))
        x = _array(dtype, 803, 3)
        with np.errstate(all="ignore"):
            for first, second in itertools.product(ARITHMETIC, ARITHMETIC):
                _pair(first, second, is_right, [x, y, z])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("level")
def test_many_operations_have_numpys_bits(dtype: str) -> None:
    """More than stay in registers, with an array or a number on either side of each."""
    x, y, number = _array(dtype, 803, 1), _array(dtype, 803, 2), np.array(1.25, dtype)
    links, expected = [("add", [0, 1], dtype)], x + y
    with np.errstate(all="ignore"):
        for place in range(40):
            op, other = ARITHMETIC[place // 4 % 4], place % 2 + 1
            is_right = place % 4 > 1
            links.append((op, [other, -1 - place] if is_right else [-1 - place, other], dtype))
            operands = (expected, (y, number)[other - 1])
            expected = getattr(np, op)(*(reversed(operands) if is_right else operands))
    _same(_run(links, [x, y, number]), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("before", range(6))
@pytest.mark.usefixtures("level")
def test_operations_around_a_division_have_numpys_bits(dtype: str, before: int) -> None:
    """All with numbers, of which several are carried out in one loop."""
    values = [1.75, np.inf, -0.0, 1e-40, 3.0, np.nan, -0.3, 1.5, 0.1]
    numbers = [np.array(value, dtype) for value in values]
    ahead = ["multiply", "add", "multiply", "multiply", "subtract", "multiply"][:before]
    x = _array(dtype, 803, 1)
    with np.errstate(all="ignore"):
        for turn, behind in enumerate(itertools.product(ARITHMETIC, repeat=3)):
            ops, expected, links = [*ahead, "divide", *behind], x, []
            for place, op in enumerate(ops):
                number = (place + turn) % len(numbers)
                links.append((op, [-place if place else 0, number + 1], dtype))
                expected = getattr(np, op)(expected, numbers[number])
            _same(_run(links, [x, *numbers]), expected)


@pytest.mark.parametrize("repeats", REPEATED)
@pytest.mark.usefixtures("level")
def test_two_operations_are_written_past_the_caches(repeats: tuple[bool, bool]) -> None:
    length = (1 << 20) + 3
    x, y, z = (np.linspace(1, 2 + i, length, dtype="float32") for i in range(3))
    y, z = (each[:1] if once else each for once, each in zip(repeats, (y, z), strict=True))
    links = [("multiply", [0, 1], 11, 0), ("add", [-1, 2], 11, 1)]
    chain = _native.chain(links, [11] * 3)
    assert chain is not None
    memory = np.empty(length + 32, "float32")
    for skipped in (0, 5):  # from a line's beginning on, and from where it has to be copied
        start = -memory.ctypes.data // 4 % 16 + skipped
        out = memory[start : start + length]
        assert chain.run(out, [x, y, z])
        np.testing.assert_array_equal(out, x * y + z)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("level")
def test_rows_that_begin_on_no_line_are_written_past_the_caches(dtype: str) -> None:
    """Each of another place within a line, of a length that fills no tiles."""
    x, y, one = _array(dtype, (300, 3501), 1), _array(dtype, (300, 1), 2), np.array(1, dtype)
    rows = [("multiply", [0, 1], dtype), ("divide", [-1, 2], dtype), ("add", [-2, 1], dtype)]
    with np.errstate(all="ignore"):
        _same(_run(rows, [x, y, one]), x * y / one + y)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.usefixtures("level")
def test_each_operation_has_numpys_bits(dtype: str) -> None:
    x, y = _array(dtype, 1003, 1), _array(dtype, 1003, 2)
    one = [*UNARY, *(OF_FLOATS if dtype in FLOATS else [])]
    two = [*BINARY, *(["divide"] if dtype in FLOATS else []), *COMPARISONS]
    with np.errstate(all="ignore"):
        for op, inputs in [*((op, [x]) for op in one), *((op, [x, y]) for op in two)]:
            expected = getattr(np, op)(*inputs)
            reads = list(range(len(inputs)))
            _same(_run([(op, reads, expected.dtype.name)], inputs), expected)


@pytest.mark.usefixtures("level")
def test_logic_has_numpys_bits() -> None:
    x, y = _array("bool", 1003, 1), _array("bool", 1003, 2)
    for op in (*LOGIC, *COMPARISONS):
        _same(_run([(op, [0, 1], "bool")], [x, y]), getattr(np, op)(x, y))
    _same(_run([("logical_not", [0], "bool")], [x]), ~x)


@pytest.mark.parametrize("dtype", ["bool", *NUMBERS])
@pytest.mark.usefixtures("level")
def test_choices_and_conversions_have_numpys_bits(dtype: str) -> None:
    x, y, condition = _array(dtype, 1003, 1), _array(dtype, 1003, 2), _array("bool", 1003)
    _same(_run([("where", [0, 1, 2], dtype)], [condition, x, y]), np.where(condition, x, y))
    with np.errstate(all="ignore"):
        for to in ("bool", *FLOATS):
            _same(_run([("cast", [0], to)], [x]), x.astype(to))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("level")
def test_relu_lets_nan_pass(dtype: str) -> None:
    x, dy = _array(dtype, 1003, 1), _array(dtype, 1003, 2)
    _same(_run([("relu", [0], dtype)], [x]), np.where(x < 0, 0, x).astype(dtype))
    expected = np.where(x > 0, dy, 0).astype(dtype)
    _same(_run([("relu_gradient", [0, 1], dtype)], [dy, x]), expected)


@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((128, 10), (10,)),
        ((128, 10), (128, 1)),
        ((3, 2000), (2000,)),
        ((3, 2000), (3, 1)),
        ((3, 2000), (1, 1)),
        ((4, 5, 6, 7), (5, 1, 7)),
        ((4, 5, 6, 7), (4, 1, 6, 1)),
        ((7, 3, 400), (7, 1, 400)),
        ((2, 3, 900), (3, 1)),
        ((0, 7), (7,)),
        ((5, 0), (5, 1)),
        ((), ()),
        ((1, 1), (1,)),
    ],
)
@pytest.mark.usefixtures("level")
def test_inputs_broadcast(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    x, y = _array("float32", shape, 1), _array("float32", other, 2)
    rows = [("multiply", [0, 1], "float32"), ("add", [-1, 1], "float32")]
    with np.errstate(all="ignore"):
        _same(_run(rows, [x, y]), x * y + y)
        _same(_run(rows, [y, x]), y * x + x)


@pytest.mark.usefixtures("level")
def test_inputs_may_be_strided_and_lie_anywhere() -> None:
    base = _array("float32", (40, 60, 30), 1)
    views = [
        base.transpose(2, 0, 1)[:, :, ::2],
        base[::-1, :, ::-1].transpose(2, 0, 1)[:, :, :30],
        _array("float32", (31, 40, 30), 2)[1:],
        np.frombuffer(b"\0" * 4 + _array("float32", 36000, 3).tobytes(), "f4")[1:].reshape(
            30, 40, 30
        ),
    ]
    rows = [("add", [0, 1], "float32"), ("multiply", [-1, 2], "float32")]
    rows.append(("subtract", [-2, 3], "float32"))
    with np.errstate(all="ignore"):
        _same(_run(rows, views), (views[0] + views[1]) * views[2] - views[3])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.usefixtures("level")
def test_the_result_may_be_an_input(length: int) -> None:
    x, y = _array("float64", length, 1), _array("float64", length, 2)
    links = [("multiply", [0, 1], "float64"), ("add", [-1, 0], "float64")]
    rows = [(op, reads, np.dtype(dtype).num, at) for at, (op, reads, dtype) in enumerate(links)]
    chain = _native.chain(rows, [x.dtype.num, y.dtype.num])
    assert chain is not None
    with np.errstate(all="ignore"):
        expected = x * y + x
    assert chain.run(x, [x, y])
    _same(x, expected)


def test_a_chain_may_be_very_long() -> None:
    x = _array("float32", 5000)
    constants = [np.array(i % 7 + 1, "float32") for i in range(1000)]
    rows: list[Row] = [("add", [0, 1], "float32")]
    for i in range(1, 1000):
        rows.append((("multiply", "divide", "add")[i % 3], [-i, i + 1], "float32"))
    expected = x.copy()
    with np.errstate(all="ignore"):
        for (op, _, _), constant in zip(rows, constants, strict=True):
            expected = getattr(np, op)(expected, constant)
        _same(_run(rows, [x, *constants]), expected)


def test_what_it_has_no_kernel_for_is_refused() -> None:
    number = np.dtype("float32").num
    assert _native.chain([("tanh", [0], number, 0)], [number]) is None
    assert _native.chain([("add", [0, 1], np.dtype("float16").num, 0)], [23, 23]) is None
    assert _native.chain([("cast", [0], np.dtype("int32").num, 0)], [number]) is None
    assert _native.chain([("add", [0, 1], number, 0)], [np.dtype("float64").num, number]) is None
    chain = _native.chain([("negative", [0], number, 0)], [number])
    assert chain is not None
    out = np.zeros(3, "float32")
    refused: list[np.ndarray] = [
        np.zeros(3, "float64"),
        np.zeros(3, ">f4"),
        np.zeros(4, "float32"),
        np.zeros((1, 3), "float32"),
        np.frombuffer(b"\0" * 13, "f4", offset=1, count=3),
    ]
    for x in refused:
        assert not chain.run(out, [x])
    assert not chain.run(np.zeros(6, "float32")[::2], [out])


@pytest.mark.parametrize(
    ("links", "match"),
    [
        ([("add", [0, 2], 11, 0)], "does not exist"),
        ([("add", [0, 1], 11, 0), ("add", [-2, 0], 11, 1)], "does not exist"),
        ([("add", [0], 11, 0)], "operands"),
        ([("add", [0, 1], 11, -1)], "scratch slot"),
        ([("less", [0, 1], 0, 0), ("add", [0, 1], 11, 0)], "several types"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(links: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _native.chain(links, [11, 11])
