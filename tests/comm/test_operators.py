"""Every operator on every type against NumPy; pairs that make no sense say so."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from allreduce import errors
from allreduce.comm import Communicator
from allreduce.comm.call import CARRIES, DTYPES, OPERATORS
from tests.harness import run_threads

bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

Array = NDArray[Any]

PAIRS = list(itertools.product(OPERATORS[1:], DTYPES[1:]))
SENSE = [(op, dtype) for op, dtype in PAIRS if dtype in CARRIES[op]]
NONSENSE = [pair for pair in PAIRS if pair not in SENSE]
LENGTHS = (3, 700, 70001)  # in the flag's line, beside it, and through the rings
FOLDS: dict[str, Any] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}


def type_of(name: str) -> np.dtype[Any]:
    return np.dtype(bfloat16 if name == "bfloat16" else name)


def contribution(dtype: str, member: int, length: int) -> Array:
    """Numbers whose sum depends on order and rounding, integers of all bits; some are zero."""
    random = np.random.default_rng([member, length])
    if dtype == "bool":
        return random.random(length) < 0.7
    wanted = type_of(dtype)
    if wanted.kind in "iu":
        values = random.integers(0, 256, (length, wanted.itemsize), np.uint8).view(wanted)[:, 0]
    else:
        values = (random.standard_normal(length) * 10.0 ** random.integers(-3, 3, length)).astype(
            wanted
        )
        if wanted.kind == "c":
            values += (1j * random.standard_normal(length)).astype(wanted)
        values[1 + member :: 17] = np.nan
        values[::19] = np.inf
    values[member::5] = 0
    return values


def expected(op: str, inputs: list[Array]) -> Array:
    """Fold in member order; 16-bit floats in float32, rounded once."""
    dtype = inputs[0].dtype
    short = dtype.itemsize == 2 and dtype.kind not in "iu"
    with np.errstate(all="ignore"):
        result = inputs[0].astype(np.float32 if short else dtype)
        for x in inputs[1:]:
            result = FOLDS[op](result, x.astype(result.dtype)).astype(result.dtype)
        if op == "mean":  # of complex numbers: of their parts
            parts = result.view(result.real.dtype)
            parts /= len(inputs)
        return result.astype(dtype)


def assert_same(found: Array, wanted: Array, what: str = "") -> None:
    """Compare; NumPy does not take bfloat16's NaNs for equal, but float32's."""
    assert found.dtype == wanted.dtype
    wide = np.float32 if found.dtype == bfloat16 else found.dtype
    np.testing.assert_array_equal(found.astype(wide), wanted.astype(wide), err_msg=what)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_pairs_that_make_sense(size: int, dtype: str) -> None:
    def member(comm: Communicator) -> None:
        for (op, name), length in itertools.product(SENSE, LENGTHS):
            if name != dtype:
                continue
            inputs = [contribution(dtype, rank, length) for rank in range(size)]
            wanted = expected(op, inputs)
            x = inputs[comm.rank]
            result = comm.all_reduce(x, op=op)
            assert_same(result, wanted, f"{op} of {length}")
            assert comm.all_reduce(x, op=op, out=x, async_op=True).wait() is x
            assert_same(x, wanted, f"{op} of {length} in place")

    run_threads(member, size)


def test_one_member_gets_truth_as_one_and_zero() -> None:
    def member(comm: Communicator) -> None:
        x = np.array([2.5, 0, np.nan, -0.0])
        assert comm.all_reduce(x, op="logical_or").tolist() == [1, 0, 1, 0]
        assert comm.all_reduce(x[:2].astype(np.int8), op="logical_and").tolist() == [1, 0]

    run_threads(member, 1)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_types_travel_through_the_other_collectives_and_symmetric_memory(dtype: str) -> None:
    def member(comm: Communicator) -> None:
        x = contribution(dtype, comm.rank, 8000)
        everyone = [contribution(dtype, rank, 8000) for rank in range(2)]
        assert_same(comm.all_gather(x), np.concatenate(everyone))
        assert_same(comm.broadcast(x, root=1), everyone[1])
        shared = comm.empty(8000, type_of(dtype))
        shared[:] = x
        op = "logical_or" if dtype == "bool" else "sum"
        comm.all_reduce(shared, op=op, out=shared)
        assert_same(shared, expected(op, everyone))

    run_threads(member, 2)


def test_a_strided_or_transposed_bfloat16_array_is_reduced() -> None:
    def member(comm: Communicator) -> None:
        x = np.arange(24).astype(bfloat16).reshape(4, 6)
        assert_same(comm.all_reduce(x.T[::2]), 2 * x.T[::2])

    run_threads(member, 2)


@pytest.mark.parametrize(("op", "dtype"), NONSENSE)
def test_pairs_that_make_no_sense(op: str, dtype: str) -> None:
    def member(comm: Communicator) -> None:
        with pytest.raises(errors.UnsupportedError) as caught:
            comm.all_reduce(np.zeros(3, type_of(dtype)), op=op)
        call, _, remedy = str(caught.value).partition(
            f" with operator {op} does not carry {dtype}: "
        )
        assert call == "[shared] rank 0: all_reduce"
        assert any(verb in remedy for verb in ("use ", "convert ", "reduce ", "all_gather "))

    run_threads(member, 1)


def test_sums_of_16_bit_floats_are_rounded_once() -> None:
    def member(comm: Communicator) -> None:
        for dtype, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
            # Half a unit of 1 each: rounded after every addition they would be lost.
            x = np.full(100, 1.0 if comm.rank == 0 else unit).astype(type_of(dtype))
            assert (comm.all_reduce(x).astype(np.float64) == 1 + 2 * unit).all()

    run_threads(member, 3)
