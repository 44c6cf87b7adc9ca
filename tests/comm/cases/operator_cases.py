"""Every operator on every type, through every collective that reduces, on any transport."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.arguments.arrays import dtype_named
from allreduce.comm.calls.call import CARRIES, DTYPES, OPERATORS, Array
from allreduce.errors import ShapeError, UnsupportedError

PAIRS = tuple((op, dtype) for dtype, op in itertools.product(DTYPES[1:], OPERATORS[1:]))
SENSE = tuple((op, dtype) for op, dtype in PAIRS if dtype in CARRIES[op])
NONSENSE = tuple(pair for pair in PAIRS if pair not in SENSE)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
FEW = (("sum", "float64"), ("mean", "float16"), ("max", "int8"))
LENGTHS = (3, 900, 70001)  # what travels with the post, what is larger, and chunks of it
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


def fold(op: str, arrays: list[Array]) -> Array:
    """Reduce in member order; 16-bit floats in float32, rounded once."""
    dtype = arrays[0].dtype
    short = dtype.itemsize == 2 and dtype.kind not in "iu"
    with np.errstate(all="ignore"):
        first = arrays[0] != 0 if op.startswith("logical") else arrays[0]
        result = np.array(first, np.float32 if short else dtype)
        for array in arrays[1:]:
            result[...] = FOLDS[op](result, array.astype(result.dtype))
        if op == "mean":  # of complex numbers: of their parts
            parts = result.reshape(-1).view(result.real.dtype)
            parts /= len(arrays)
        return result.astype(dtype)


def assert_same(found: Array, wanted: Array, what: str = "") -> None:
    """Compare; NumPy does not take bfloat16's NaNs for equal, but float32's."""
    assert found.dtype == wanted.dtype, what
    wide = np.float32 if str(found.dtype) == "bfloat16" else found.dtype
    np.testing.assert_array_equal(found.astype(wide), wanted.astype(wide), err_msg=what)


@functools.lru_cache(maxsize=64)  # those of one type, which come after each other
def exact(dtype: str, member: int, length: int) -> Array:
    """Return numbers that any order combines to the same: small whole ones, integers of all bits.

    A fifth of them is zero, so that truth is not all there is. Read-only.
    """
    kind = dtype_named(dtype)
    mixed = (np.arange(length, dtype=np.uint64) * (member + 3) + member) * 0x9E3779B97F4A7C15
    small = (mixed >> 40) % 5
    whole = small.astype(np.float64) - 2
    if kind.kind in "iu":
        found = np.where(small == 2, 0, mixed).astype(kind)
    elif kind.kind == "c":
        found = (whole + 1j * np.roll(whole, 1)).astype(kind)
    else:
        found = whole.astype(kind)
    found.flags.writeable = False
    return found


def every_pair(comm: Communicator, where: str) -> None:
    """All pairs that make sense through each collective; the lengths take turns."""
    memory = _memory(comm, where)
    for turn, (op, dtype) in enumerate(SENSE):
        for number, collective in enumerate(REDUCING):
            _reduces(comm, memory, collective, op, dtype, LENGTHS[(turn + number) % len(LENGTHS)])


def every_pair_and_length(comm: Communicator, where: str) -> None:
    """The full product of pairs, collectives and lengths."""
    memory = _memory(comm, where)
    for (op, dtype), collective, length in itertools.product(SENSE, REDUCING, LENGTHS):
        _reduces(comm, memory, collective, op, dtype, length)


def _memory(comm: Communicator, where: str) -> Array:
    """Return memory for the largest input and output, ordinary or symmetric."""
    shape = (2, max(LENGTHS) * comm.size)
    return np.empty(shape, "c16") if where == "private" else comm.empty(shape, "complex128")


def _reduces(
    comm: Communicator, memory: Array, collective: str, op: str, dtype: str, length: int
) -> None:
    scatters, root = collective == "reduce_scatter", length % comm.size
    count = length * comm.size if scatters else length
    inputs = [exact(dtype, member, count) for member in range(comm.size)]
    wanted = fold(op, inputs)
    if scatters:
        wanted = wanted[comm.rank * length :][:length]
    x, out = (row.view(wanted.dtype) for row in memory)
    x, out = x[:count], out[:length]
    x[...] = inputs[comm.rank]
    out[...] = 1
    what = f"{collective} of {length} {dtype} by {op}"
    more = {"root": root} if collective == "reduce" else {}
    result = getattr(comm, collective)(x, op=op, out=out, **more)
    if collective == "reduce" and comm.rank != root:
        assert result is None, what
        wanted = np.ones_like(out)
    else:
        assert result is out, what
    assert_same(out, wanted, what)
    assert_same(x, inputs[comm.rank], what)


def reduces(comm: Communicator, where: str, op: str, dtype: str) -> None:
    """One pair through each collective, of every length."""
    memory = _memory(comm, where)
    for collective, length in itertools.product(REDUCING, LENGTHS):
        _reduces(comm, memory, collective, op, dtype, length)


def every_type(comm: Communicator) -> None:
    """All types through collectives that only move them, with alternating lengths."""
    size, me, last = comm.size, comm.rank, comm.size - 1
    for dtype, length in zip(DTYPES[1:], itertools.cycle(LENGTHS), strict=False):
        inputs = [exact(dtype, member, length * size) for member in range(size)]
        shares = [values[:length] for values in inputs]
        joined = np.concatenate(shares)
        assert_same(comm.all_gather(shares[me]), joined, dtype)
        assert_same(comm.broadcast(shares[me], root=last), shares[last], dtype)
        mine = comm.scatter(inputs[last] if me == last else None, root=last)
        assert_same(mine, inputs[last][me * length :][:length], dtype)
        if (gathered := comm.gather(shares[me])) is not None:
            assert_same(gathered, joined, dtype)
        rows = [values[me * length :][:length] for values in inputs]
        assert_same(comm.all_to_all(inputs[me]), np.concatenate(rows), dtype)
        sent = comm.send(shares[me], (me + 1) % size, async_op=True)
        assert_same(comm.recv(np.zeros_like(shares[me]), (me - 1) % size), shares[me - 1], dtype)
        sent.wait()


def rounded_once(comm: Communicator) -> None:
    """16-bit floats are added in float32: intermediate sums may exceed their range."""
    for dtype, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        for length in LENGTHS:
            # Half a unit of 1 each: rounded after every addition they would be lost.
            x = np.full(length, 1.0 if comm.rank == 0 else unit).astype(dtype_named(dtype))
            total = (1 + (comm.size - 1) * unit) * np.ones(length)
            assert_same(comm.all_reduce(x), total.astype(x.dtype), dtype)
    large = np.full(900, 60000 if comm.rank % 2 == 0 else -60000, np.float16)
    mean = 60000 / comm.size if comm.size % 2 else 0
    assert (comm.all_reduce(large, op="mean") == np.float16(mean)).all()


def nonsense(comm: Communicator) -> None:
    """All other pairs are refused by each collective, with operator, dtype, rank and remedy."""
    for (op, dtype), collective in itertools.product(NONSENSE, REDUCING):
        with pytest.raises(UnsupportedError) as caught:
            getattr(comm, collective)(np.zeros(3 * comm.size, dtype_named(dtype)), op=op)
        text = str(caught.value)
        call, _, remedy = text.partition(f" with operator {op} does not carry {dtype}: ")
        who = rf"(rank {comm.rank}|replica {comm.rank} \(rank 0\))"
        assert re.fullmatch(rf"\[{comm.transport}\] {who}: {collective}", call), text
        assert re.search("(use|convert|reduce|all_gather) ", remedy), text
    if comm.size > 1:
        whose = "the array's" if comm.rank == 0 else "root 0's array has"
        with pytest.raises(ShapeError, match=f"{comm.size} equal shares, but {whose} shape"):
            comm.scatter(np.zeros(comm.size + 1) if comm.rank == 0 else None)
    assert comm.all_reduce(1) == comm.size  # and nothing was changed
