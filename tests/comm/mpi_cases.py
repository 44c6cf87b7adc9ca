"""What the mpi transport has to do, as functions of one member that speak to the transport itself.

They make the calls as a communicator would have them: checked, and of contiguous arrays.
"""

from __future__ import annotations

import itertools
import resource
import threading
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from allreduce.comm import Communicator, Work, replica_communicators, world
from allreduce.comm.call import Call
from allreduce.comm.mpi.transport import MpiTransport
from allreduce.comm.mpi.types import Library
from allreduce.errors import OutOfMemoryError
from tests.comm.operator_cases import SENSE, fold

Array = NDArray[Any]

TYPES = ("float64", "float16", "bfloat16", "int8", "uint32", "bool", "complex128")
COUNTS = (0, 1, 5, 1000)
FEW = (("sum", "float64"), ("mean", "float16"), ("max", "int8"))


def transport(comm: Communicator) -> MpiTransport:
    found = comm._transport
    assert isinstance(found, MpiTransport)
    return found


def start(
    comm: Communicator, collective: str, x: Array | None, out: Array | None, count: int, **more: Any
) -> Work:
    """Start a call; `more` are the other fields of it."""
    array = x if x is not None else out
    fields = {"op": None, "root": None, **more}
    dtype = "none" if array is None else str(array.dtype)
    call = Call(collective=collective, dtype=dtype, count=count, group="g", **fields)
    return transport(comm).start(call, x, out, lambda: out)


def go(comm: Communicator, collective: str, x: Any, out: Any, count: int, **more: Any) -> Any:
    return start(comm, collective, x, out, count, **more).wait()


def values(member: int, count: int, dtype: str) -> Array:
    """Return small whole numbers, exact in any type; bits of them are no zeros and ones only."""
    whole = (np.arange(count) * 7 + member * 3) % 5
    return whole.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def zeros(count: int, dtype: str) -> Array:
    return np.zeros(count, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def uneven(size: int, count: int) -> tuple[int, ...]:
    """Return shares that differ, one of them empty."""
    return tuple(0 if member == 1 else count + member for member in range(size))


def moved(comm: Communicator, types: Sequence[str] = TYPES) -> None:
    """Every way of moving equal and unequal shares, to and from every root."""
    for dtype in types:
        for count in COUNTS:
            for counts in (None, uneven(comm.size, count)):
                _joined_and_cut(comm, dtype, count, counts)
            _turned(comm, dtype, count)
            for root in range(comm.size):
                out = zeros(count, dtype)
                x = values(root, count, dtype) if comm.rank == root else out
                go(comm, "broadcast", x, out, count, root=root)
                np.testing.assert_array_equal(out, values(root, count, dtype))


def _joined_and_cut(
    comm: Communicator, dtype: str, count: int, counts: tuple[int, ...] | None
) -> None:
    rank, shares = comm.rank, counts or (count,) * comm.size
    parts = [values(member, share, dtype) for member, share in enumerate(shares)]
    whole, total = np.concatenate(parts), sum(shares)
    more = {"counts": counts}
    number = total if counts else count
    out = zeros(total, dtype)
    go(comm, "all_gather", parts[rank], out, number, **more)
    np.testing.assert_array_equal(out, whole)
    out = zeros(total, dtype)
    own = out[sum(shares[:rank]) :][: shares[rank]]
    own[:] = parts[rank]
    go(comm, "all_gather", own, out, number, **more)
    np.testing.assert_array_equal(out, whole)
    for root in range(comm.size):
        at_root = rank == root
        joined = zeros(total, dtype) if at_root else None
        go(comm, "gather", parts[rank], joined, number, root=root, **more)
        if joined is not None:
            np.testing.assert_array_equal(joined, whole)
        part = zeros(shares[rank], dtype)
        go(comm, "scatter", whole if at_root else None, part, number, root=root, **more)
        np.testing.assert_array_equal(part, parts[rank])


def _turned(comm: Communicator, dtype: str, count: int) -> None:
    """all_to_all, with equal shares and with a table of them."""
    rank, size = comm.rank, comm.size
    rows = [values(member, size * count, dtype).reshape(size, count) for member in range(size)]
    out = zeros(size * count, dtype)
    go(comm, "all_to_all", rows[rank].reshape(-1), out, count)
    np.testing.assert_array_equal(out, np.concatenate([row[rank] for row in rows]))
    table = np.array([[(i * 2 + j + count) % 7 for j in range(size)] for i in range(size)])
    sent = [values(member, int(table[member].sum()), dtype) for member in range(size)]
    cut = [np.split(sent[member], np.cumsum(table[member])[:-1]) for member in range(size)]
    counts, receives = (tuple(map(int, line)) for line in (table[rank], table[:, rank]))
    out = zeros(sum(receives), dtype)
    go(comm, "all_to_all", sent[rank], out, sum(counts), counts=counts, receives=receives)
    np.testing.assert_array_equal(out, np.concatenate([parts[rank] for parts in cut]))


def reduced(comm: Communicator, pairs: Sequence[tuple[str, str]] = SENSE) -> None:
    """Every operator on every type that it makes sense on, apart, in place and by shares."""
    for op, dtype in pairs:
        _reduced_whole(comm, op, [values(member, 700, dtype) for member in range(comm.size)])
        _reduced_shares(comm, op, dtype, uneven(comm.size, 9), uneven(comm.size, 9))
    for (op, dtype), count in itertools.product(FEW, (0, 1, 700)):
        _reduced_whole(comm, op, [values(member, count, dtype) for member in range(comm.size)])
        _reduced_shares(comm, op, dtype, (count,) * comm.size, None)


def _reduced_whole(comm: Communicator, op: str, inputs: list[Array]) -> None:
    expected, x, count = fold(op, inputs), inputs[comm.rank].copy(), inputs[0].size
    out = np.zeros_like(x)
    go(comm, "all_reduce", x, out, count, op=op)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(x, inputs[comm.rank])
    go(comm, "all_reduce", out := x.copy(), out, count, op=op)
    np.testing.assert_array_equal(out, expected)
    root = comm.size - 1
    for place in (np.zeros_like(x), x):  # the last one in place
        go(comm, "reduce", x, place if comm.rank == root else None, count, op=op, root=root)
        if comm.rank == root:
            np.testing.assert_array_equal(place, expected)


def _reduced_shares(
    comm: Communicator, op: str, dtype: str, shares: tuple[int, ...], counts: Any
) -> None:
    inputs = [values(member, sum(shares), dtype) for member in range(comm.size)]
    first = sum(shares[: comm.rank])
    out = zeros(shares[comm.rank], dtype)
    number = sum(shares) if counts else shares[0]
    go(comm, "reduce_scatter", inputs[comm.rank], out, number, op=op, counts=counts)
    np.testing.assert_array_equal(out, fold(op, inputs)[first : first + shares[comm.rank]])


def halves(comm: Communicator) -> None:
    """float16 is summed in float32: what float16 cannot hold on the way does not matter."""
    x = np.full(10, 60000 if comm.rank % 2 == 0 else -60000, np.float16)
    out = np.zeros_like(x)
    go(comm, "all_reduce", x, out, 10, op="mean")
    assert np.isfinite(out).all()
    tiny = np.full(10, 2048 if comm.rank == 0 else 0.75, np.float16)
    go(comm, "all_reduce", tiny, out, 10, op="sum")
    assert (out == np.float16(2048 + 0.75 * (comm.size - 1))).all()


def messages(comm: Communicator) -> None:
    """Tags and any source, waited in another order than sent; a message to oneself."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for exact in (True, False):
        sends = [
            start(comm, "send", np.full(10, comm.rank * 10.0 + i), None, 10, root=to, tag=i)
            for i in range(5)
        ]
        tags = range(4, -1, -1) if exact else [-1] * 5
        outs = [np.zeros(10) for _ in tags]
        receives = [
            start(comm, "recv", None, out, 10, root=source if exact or i % 2 else -1, tag=tag)
            for i, (tag, out) in enumerate(zip(tags, outs, strict=True))
        ]
        for work in [*reversed(receives), *sends]:
            work.wait()
        came = [out[0] for out in (reversed(outs) if exact else outs)]
        assert came == [source * 10.0 + i for i in range(5)]
        comm.barrier()
    empty, big = np.zeros(0, np.int16), np.arange(300000) + comm.rank
    for x in (empty, big):
        out = np.zeros_like(x)
        work = start(comm, "send", x, None, x.size, root=comm.rank, tag=7)
        go(comm, "recv", None, out, x.size, root=comm.rank, tag=7)
        work.wait()
        np.testing.assert_array_equal(out, x)


def pieces(comm: Communicator) -> None:
    """All of it again, with a library that counts to 300 and not further."""
    mine = transport(comm)
    mine._library, whole = Library(mine._mpi, 300), mine._library
    try:
        moved(comm, ("float64", "int8"))
        reduced(comm, FEW)
        messages(comm)
    finally:
        mine._library = whole


def equal_bits(comm: Communicator) -> None:
    """Sums of floats whose order matters are equal on all members, if not on other transports."""
    random = np.random.default_rng(comm.rank)
    for count in (3, 1000, 100003):
        x = (random.standard_normal(count) * 10.0 ** random.integers(-6, 6, count)).astype("f4")
        total = comm.all_reduce(x)
        every = comm.all_gather(total).reshape(comm.size, count)
        assert all(row.tobytes() == total.tobytes() for row in every)
        np.testing.assert_allclose(
            total, np.sum(comm.all_gather(x).reshape(every.shape), 0), 1e-2, 1
        )


def many_in_flight(comm: Communicator) -> None:
    """Hundreds of calls over two communicators, waited in an order of each member's own."""
    (other,) = replica_communicators(world(), 1, name="other")
    works = []
    for index in range(300):
        x = np.full(1 + index % 3 * 5000, float(index + comm.rank))
        works.append((index, (comm, other)[index % 2].all_reduce(x, async_op=True)))
    order = np.random.default_rng(comm.rank).permutation(len(works))
    for index, work in (works[i] for i in order):
        assert work.wait()[-1] == index * comm.size + sum(range(comm.size))
        assert work.done()
    other.close()


def from_threads(comm: Communicator) -> None:
    """Threads wait at the same time, each for works of its own."""
    works = [comm.all_reduce(np.full(20000, float(i)), async_op=True) for i in range(20)]
    sums: list[float] = [0.0] * len(works)

    def wait(index: int) -> None:
        sums[index] = float(works[index].wait()[-1])

    threads = [threading.Thread(target=wait, args=(i,)) for i in reversed(range(len(works)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sums == [float(i * comm.size) for i in range(len(works))]


def memory(comm: Communicator) -> None:
    array = comm.empty((100, 3), "float32")
    assert array.shape == (100, 3)
    assert array.ctypes.data % 64 == 0
    with pytest.raises(OutOfMemoryError, match="this rank has no"):
        comm.empty(1 << 58, "float32")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if comm.rank == 0:  # it alone is short of memory
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, hard))
    try:
        with pytest.raises(OutOfMemoryError, match="another" if comm.rank else "this rank"):
            comm.empty(1 << 30, "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert comm.all_reduce(1) == comm.size  # it is still alive


def plans(comm: Communicator) -> None:
    """MPI does not say what it would do; how members agree is ours to say."""
    for collective, steps in (("all_reduce", 2), ("barrier", 2), ("send", 1)):
        planned = comm.plan(collective, np.ones(9), dest=0 if collective == "send" else None)
        assert (planned.algorithm, planned.sent, len(planned.steps)) == ("mpi", None, steps)
        assert "MPI decides" in planned.steps[-1]
