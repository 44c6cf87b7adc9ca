"""Every operator on every type of any numbers, in member order and to the bit, against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.arguments.arrays import dtype_named
from allreduce.comm.calls.call import DTYPES, Array
from tests.comm.cases.operator_cases import SENSE, assert_same, fold
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


def test_a_strided_or_transposed_bfloat16_array_is_reduced() -> None:
    def member(comm: Communicator) -> None:
        x = np.arange(24).astype(dtype_named("bfloat16")).reshape(4, 6)
        assert_same(comm.all_reduce(x.T[::2]), 2 * x.T[::2])

    run_threads(member, 2)
