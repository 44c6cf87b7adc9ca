"""Every operator on every type of any numbers, in member order and to the bit, against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.array import Array
from allreduce.comm.arrays import dtype_named
from allreduce.comm.call import DTYPES
from tests.comm.operator_cases import SENSE, assert_same, fold
from tests.harness import run_threads

LENGTHS = (3, 700, 70001)  # in the flag's line, beside it, and through the rings


def contribution(dtype: str, member: int, length: int) -> Array:
    """Numbers whose sum depends on order and rounding, integers of all bits; some are zero."""
    random = np.random.default_rng([member, length])
    if dtype == "bool":
        return random.random(length) < 0.7
    wanted = dtype_named(dtype)
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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_pairs_that_make_sense(size: int, dtype: str) -> None:
    def member(comm: Communicator) -> None:
        for (op, name), length in itertools.product(SENSE, LENGTHS):
            if name != dtype:
                continue
            inputs = [contribution(dtype, rank, length) for rank in range(size)]
            wanted = fold(op, inputs)
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
        shared = comm.empty(8000, dtype_named(dtype))
        shared[:] = x
        op = "logical_or" if dtype == "bool" else "sum"
        comm.all_reduce(shared, op=op, out=shared)
        assert_same(shared, fold(op, everyone))

    run_threads(member, 2)


def test_a_strided_or_transposed_bfloat16_array_is_reduced() -> None:
    def member(comm: Communicator) -> None:
        x = np.arange(24).astype(dtype_named("bfloat16")).reshape(4, 6)
        assert_same(comm.all_reduce(x.T[::2]), 2 * x.T[::2])

    run_threads(member, 2)


def test_sums_of_16_bit_floats_are_rounded_once() -> None:
    def member(comm: Communicator) -> None:
        for dtype, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
            # Half a unit of 1 each: rounded after every addition they would be lost.
            x = np.full(100, 1.0 if comm.rank == 0 else unit).astype(dtype_named(dtype))
            assert (comm.all_reduce(x).astype(np.float64) == 1 + 2 * unit).all()

    run_threads(member, 3)
