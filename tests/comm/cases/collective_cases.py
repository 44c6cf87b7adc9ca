"""Cases that every transport must pass, as functions of one member, a thread or a process."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allreduce.comm import Communicator
from tests.comm.cases.operator_cases import fold

Array = NDArray[Any]

DTYPES = ("float64", "float32", "int32", "int64")
OPS = ("sum", "mean", "min", "max", "prod")
WHERE = ("private", "symmetric")


def lengths(size: int) -> tuple[int, ...]:
    """Nothing, less than a member each, small, and many chunks of private memory."""
    return (0, 1, size - 1, 1000, 1000003)


def whole(length: int, dtype: str, member: int) -> Array:
    """Return small whole numbers: sums, and products over 7 members, are exact in any type."""
    period = (np.arange(5) * 7 + member * 3) % 5 - 2
    return np.tile(period.astype(dtype), length // 5 + 1)[:length]


def place(comm: Communicator, where: str, values: Array) -> Array:
    """Return the values in ordinary or in symmetric memory."""
    array = comm.empty(values.shape, values.dtype) if where == "symmetric" else values.copy()
    array[...] = values
    return array


def new_output(comm: Communicator, where: str, shape: tuple[int, ...], dtype: str) -> Array:
    return place(comm, where, np.full(shape, 77, dtype))


def digest(array: Array) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def all_reduce(comm: Communicator, where: str, op: str, dtype: str, length: int) -> None:
    inputs = [whole(length, dtype, member) for member in range(comm.size)]
    expected = fold(op, inputs)
    x = place(comm, where, inputs[comm.rank])
    out = new_output(comm, where, x.shape, dtype)
    assert comm.all_reduce(x, op=op, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(x, inputs[comm.rank])
    comm.all_reduce(x, op=op, out=x)
    np.testing.assert_array_equal(x, expected)
    fresh = comm.all_reduce(inputs[comm.rank], op=op)
    assert fresh.dtype == dtype
    np.testing.assert_array_equal(fresh, expected)


def reduce_scatter(comm: Communicator, where: str, op: str, dtype: str, length: int) -> None:
    inputs = [whole(length * comm.size, dtype, member) for member in range(comm.size)]
    expected = fold(op, inputs)[comm.rank * length :][:length]
    x = place(comm, where, inputs[comm.rank])
    out = new_output(comm, where, (length,), dtype)
    comm.reduce_scatter(x, op=op, out=out)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(x, inputs[comm.rank])
    np.testing.assert_array_equal(comm.reduce_scatter(inputs[comm.rank], op=op), expected)


def all_gather(comm: Communicator, where: str, dtype: str, length: int) -> None:
    inputs = [whole(length, dtype, member) for member in range(comm.size)]
    x = place(comm, where, inputs[comm.rank])
    out = new_output(comm, where, (length * comm.size,), dtype)
    comm.all_gather(x, out=out)
    np.testing.assert_array_equal(out, np.concatenate(inputs))
    np.testing.assert_array_equal(comm.all_gather(inputs[comm.rank]), np.concatenate(inputs))
    out[:] = 0
    own = out[comm.rank * length :][:length]
    own[:] = inputs[comm.rank]
    comm.all_gather(own, out=out)
    np.testing.assert_array_equal(out, np.concatenate(inputs))


def broadcast(comm: Communicator, where: str, dtype: str, length: int) -> None:
    for root in {0, comm.size - 1}:
        expected = whole(length, dtype, root)
        x = place(comm, where, whole(length, dtype, comm.rank))
        out = new_output(comm, where, x.shape, dtype)
        comm.broadcast(x, root=root, out=out)
        np.testing.assert_array_equal(out, expected)
        comm.broadcast(x, root=root, out=x)
        np.testing.assert_array_equal(x, expected)
        fresh = comm.broadcast(whole(length, dtype, comm.rank), root=root)
        np.testing.assert_array_equal(fresh, expected)


def every_length(comm: Communicator, where: str) -> None:
    """All collectives over all lengths; the types take turns."""
    types = itertools.cycle(DTYPES)
    ops = itertools.cycle(OPS[:1] + OPS[2:])
    for length in lengths(comm.size):
        all_reduce(comm, where, next(ops), next(types), length)
        reduce_scatter(comm, where, next(ops), next(types), length if length < 2000 else 200003)
        all_gather(comm, where, next(types), length if length < 2000 else 300007)
        broadcast(comm, where, next(types), length)
        comm.barrier()


def floats(member: int, dtype: str, length: int) -> Array:
    """Return numbers whose sum depends on the order, with the special ones among them."""
    random = np.random.default_rng(member)
    values = (random.standard_normal(length) * 10.0 ** random.integers(-6, 6, length)).astype(dtype)
    special = [np.inf, -0.0, np.finfo(dtype).tiny / 3, 0.0]
    values[: len(special)] = special
    if member == 1:
        values[-1] = np.nan
    return values


def bits(comm: Communicator, where: str) -> list[str]:
    """Sums of floats are the sequential NumPy sums, to the bit; returns digests to compare."""
    digests = []
    for op, dtype, length in itertools.product(
        ("sum", "mean", "min", "max"), ("float32", "float64"), (100, 5003, 140003)
    ):
        inputs = [floats(member, dtype, length) for member in range(comm.size)]
        x = place(comm, where, inputs[comm.rank])
        comm.all_reduce(x, op=op, out=x)
        assert x.tobytes() == fold(op, inputs).tobytes(), (op, dtype, length)
        digests.append(digest(x))
    return digests


def equal_bits(comm: Communicator) -> None:
    """Sums of floats whose order matters are equal on all members, in whichever they are added."""
    random = np.random.default_rng(comm.rank)
    for length, dtype in itertools.product((3, 1000, 100003), ("float32", "float16")):
        x = random.standard_normal(length).astype(dtype)
        for op in ("sum", "mean"):
            total = comm.all_reduce(x, op=op)
            every = comm.all_gather(total).reshape(comm.size, length)
            assert all(row.tobytes() == total.tobytes() for row in every), (op, dtype, length)


def slices(comm: Communicator) -> None:
    """Parts of symmetric arrays are symmetric too, also at other offsets on other members."""
    length = 30011
    buffer = comm.empty((comm.size + 3, length), "float32")
    buffer[:] = -1
    inputs = [whole(length, "float32", member) for member in range(comm.size)]
    row = buffer[comm.rank]
    row[:] = inputs[comm.rank]
    comm.all_reduce(row, out=buffer[comm.rank + 2])
    np.testing.assert_array_equal(buffer[comm.rank + 2], fold("sum", inputs))
    np.testing.assert_array_equal(row, inputs[comm.rank])
    odd = buffer[-1, 3:20014]
    odd[:] = comm.rank
    comm.all_reduce(odd, out=odd, op="max")
    assert (odd == comm.size - 1).all()
    assert buffer[-1, 2] == buffer[-1, 20014] == -1


def in_flight(comm: Communicator) -> None:
    """Hundreds of started calls, waited for in a different order on each member."""
    results = []
    for index in range(300):
        length = (3, 2000, 50000)[index % 3]
        x = np.full(length, comm.rank + index, np.int64)
        results.append((index, comm.all_reduce(x, async_op=True)))
    order = np.random.default_rng(comm.rank).permutation(len(results))
    for position in order:
        index, work = results[position]
        expected = sum(range(comm.size)) + index * comm.size
        assert (work.wait() == expected).all()
        assert work.done()


def prepared(comm: Communicator) -> None:
    """A call prepared once and started often, in turn with others and with another such."""
    sums, most = np.zeros(3000), comm.empty((70_000,), "float32")
    begin_sum = comm.all_reduce_init(sums, out=sums)
    begin_max = comm.all_reduce_init(most, op="max", out=most)
    for step in range(5):
        sums[...] = comm.rank + step
        most[...] = comm.rank * step
        works = begin_sum(), begin_max()
        comm.barrier()
        assert works[1].wait() is most
        assert works[0].wait() is sums
        assert (sums == sum(range(comm.size)) + step * comm.size).all()
        assert (most == (comm.size - 1) * step).all()


def planned(comm: Communicator) -> None:
    """Every call has a plan, which says it as its caller would write it."""
    x, rows = np.ones((4 * comm.size, 3), "float32"), [2] * comm.size
    wanted = [
        comm.plan("all_reduce", x, op="max"),
        comm.plan("all_reduce", [x, np.ones(2, "int64"), x[0]]),
        comm.plan("all_to_all", x[: 2 * comm.size], counts=rows, receives=rows),
        comm.plan("scatter", x, root=comm.size - 1),
        comm.plan("broadcast", x),
        comm.plan("barrier"),
        comm.plan("send", x[0], dest=comm.size - 1),
        comm.plan("recv", np.ones(5000)),
    ]
    whole = f"float32[{4 * comm.size}, 3]"
    assert [plan.call for plan in wanted] == [
        f"all_reduce({whole}, op='max')",
        f"all_reduce([{whole}, int64[2], float32[3]], op='sum')",
        f"all_to_all(float32[{2 * comm.size}, 3], counts={rows}, receives={rows})",
        f"scatter({whole}, root={comm.size - 1})",
        f"broadcast({whole}, root=0)",
        "barrier()",
        f"send(float32[3], dest={comm.size - 1}, tag=0)",
        "recv(float64[5000], source=ANY, tag=ANY)",
    ]
    assert len(wanted[1].parts) == 2


def dropped(comm: Communicator) -> None:
    """A work without a wait is completed by later calls, and keeps its arrays."""
    out = np.zeros(100000)
    comm.all_reduce(np.full(100000, 1.0), out=out, async_op=True)
    comm.barrier()
    assert (out == comm.size).all()


def numbers(comm: Communicator) -> None:
    total = sum(range(comm.size))
    result = comm.all_reduce(comm.rank)
    assert (type(result), result) == (int, total)
    result = comm.all_reduce(float(comm.rank), op="mean")
    assert (type(result), result) == (float, total / comm.size)
    assert type(comm.all_reduce(np.float32(2))) is np.float32
    assert comm.all_reduce(np.array(3.0)).shape == ()
    assert comm.broadcast(comm.rank, root=comm.size - 1) == comm.size - 1
    np.testing.assert_array_equal(comm.all_gather(comm.rank), np.arange(comm.size))


def layouts(comm: Communicator) -> None:
    """Transposed, strided, read-only, zero-length and many-dimensional arrays."""
    base = np.arange(24.0).reshape(2, 3, 4) + comm.rank
    extra = sum(range(comm.size))
    expected = np.arange(24.0).reshape(2, 3, 4) * comm.size + extra
    np.testing.assert_array_equal(comm.all_reduce(base), expected)
    np.testing.assert_array_equal(comm.all_reduce(base.T), expected.T)
    np.testing.assert_array_equal(comm.all_reduce(base[:, ::2]), expected[:, ::2])
    frozen = base.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(comm.all_reduce(frozen), expected)
    target = np.zeros((2, 3, 8))[..., ::2]
    assert comm.all_reduce(base, out=target) is target
    np.testing.assert_array_equal(target, expected)
    work = comm.all_reduce(base, out=target, op="max", async_op=True)
    np.testing.assert_array_equal(work.wait(), np.arange(24.0).reshape(2, 3, 4) + comm.size - 1)
    target[:] = 7
    assert work.wait() is target
    assert (target == 7).all()  # it was the caller's again
    assert comm.all_gather(np.zeros((0, 5))).shape == (0, 5)
    assert comm.all_gather(base).shape == (2 * comm.size, 3, 4)
    assert comm.reduce_scatter(np.ones((3 * comm.size, 2))).shape == (3, 2)


def many_small(comm: Communicator) -> None:
    """More calls than there are slots, of members that run ahead of each other."""
    x = np.zeros(5, np.int64)
    for index in range(500):
        x[:] = comm.rank + index
        assert comm.all_reduce(x)[4] == sum(range(comm.size)) + index * comm.size


def freed(comm: Communicator) -> None:
    """Symmetric memory goes with its last array: mapped bytes do not grow. It begins as zeros."""

    def regions() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:allreduce" in line or "/dev/zero" in line for line in maps)

    def writable() -> int:
        with open("/proc/self/maps") as maps:
            ends = [line.split()[0].split("-") for line in maps if " rw" in line]
        return sum(int(last, 16) - int(first, 16) for first, last in ends)

    def repeat(count: int, times: int) -> None:
        comm.barrier()
        for _ in range(times):
            array = comm.empty((count,), "float32")
            assert not array.any()
            part = array[10:]
            del array
            part[:] = 1
            comm.all_reduce(part, out=part)
            assert (part == comm.size).all()
            del part
            comm.barrier()

    comm.barrier()
    before = regions()
    repeat(50000, 5)
    assert regions() <= before
    if comm.transport == "shared":  # others leave it to malloc, which keeps some
        before = writable()
        repeat(1 << 20, 3)  # threads of one process have it in large pages
        assert writable() < before + (4 << 20)
        comm.barrier()
