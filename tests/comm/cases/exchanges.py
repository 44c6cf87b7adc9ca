"""More cases for every transport: rooted calls, unequal shares, lists and plain data."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce.comm import Communicator
from tests.comm.cases.collective_cases import Array, new_output, place, whole
from tests.comm.cases.operator_cases import fold

LENGTHS = (0, 1, 300, 70001)
FACTS = {
    "text": "ü",
    "bytes": b"\x00\xff",
    "list": [1, 2.5, None, True, {"deep": []}],
    "n": -(2**60),
}


def rooted(comm: Communicator, where: str) -> None:
    """Only the root has a result, or something to give."""
    for root in {0, comm.size - 1}:
        for length in LENGTHS:
            inputs = [whole(length, "float32", member) for member in range(comm.size)]
            x = place(comm, where, inputs[comm.rank])
            reduced = comm.reduce(x, root=root)
            gathered = comm.gather(x, root=root)
            mine = comm.scatter(np.concatenate(inputs) if comm.rank == root else None, root=root)
            np.testing.assert_array_equal(mine, inputs[comm.rank])
            np.testing.assert_array_equal(x, inputs[comm.rank])
            if comm.rank != root:
                assert reduced is None
                assert gathered is None
                continue
            np.testing.assert_array_equal(reduced, fold("sum", inputs))
            np.testing.assert_array_equal(gathered, np.concatenate(inputs))


def into_out(comm: Communicator, where: str) -> None:
    """`out` is taken where there is a result, also if it shares the input's own place."""
    length, root = 5003, comm.size // 2
    inputs = [whole(length, "float64", member) for member in range(comm.size)]
    out = new_output(comm, where, (length,), "float64")
    result = comm.reduce(place(comm, where, inputs[comm.rank]), op="max", root=root, out=out)
    assert result is (out if comm.rank == root else None)
    np.testing.assert_array_equal(out, fold("max", inputs) if comm.rank == root else 77)
    joined = new_output(comm, where, (length * comm.size,), "float64")
    own = joined[comm.rank * length :][:length]
    own[:] = inputs[comm.rank]
    comm.gather(own, root=root, out=joined)
    if comm.rank == root:
        np.testing.assert_array_equal(joined, np.concatenate(inputs))
    comm.scatter(joined if comm.rank == root else None, root=root, out=own)
    np.testing.assert_array_equal(own, inputs[comm.rank])


def everybody_to_everybody(comm: Communicator, where: str) -> None:
    for length in LENGTHS:
        table = [
            whole(length * comm.size, "int64", m).reshape(comm.size, -1) for m in range(comm.size)
        ]
        x = place(comm, where, table[comm.rank])
        expected = np.stack([rows[comm.rank] for rows in table])
        np.testing.assert_array_equal(comm.all_to_all(x), expected)
        out = new_output(comm, where, expected.shape, "int64")
        assert comm.all_to_all(x, out=out) is out
        np.testing.assert_array_equal(out, expected)


def shares(size: int, length: int) -> list[int]:
    """Return rows per member: all different, one without any."""
    return [0 if member == 1 else length // (member + 1) for member in range(size)]


def unequal(comm: Communicator, where: str) -> None:
    """Counts of rows per member, for arrays of rows of three."""
    for length in (1, 300, 30011):
        counts = shares(comm.size, length)
        total, low = sum(counts), sum(counts[: comm.rank])
        inputs = [whole(total * 3, "float32", member).reshape(-1, 3) for member in range(comm.size)]
        summed, own = fold("sum", inputs), counts[comm.rank]
        x = place(comm, where, inputs[comm.rank])
        mine = comm.reduce_scatter(x, counts=counts)
        np.testing.assert_array_equal(mine, summed[low : low + own])
        np.testing.assert_array_equal(comm.all_gather(mine, counts=counts), summed)
        root = comm.size - 1
        gathered = comm.gather(mine, counts=counts, root=root)
        np.testing.assert_array_equal(comm.scatter(gathered, counts=counts, root=root), mine)
        if comm.rank == root:
            np.testing.assert_array_equal(gathered, summed)


def unequal_exchange(comm: Communicator, where: str) -> None:
    """Member i gives `(i + j) % size` times `length` rows to member j."""
    for length in (1, 40, 9001):
        sent = [[(i + j) % comm.size * length for j in range(comm.size)] for i in range(comm.size)]
        inputs = [
            whole(sum(counts) * 2, "int32", i).reshape(-1, 2) for i, counts in enumerate(sent)
        ]
        expected = []
        for rows, counts in zip(inputs, sent, strict=True):
            low = sum(counts[: comm.rank])
            expected.append(rows[low : low + counts[comm.rank]])
        x = place(comm, where, inputs[comm.rank])
        got = comm.all_to_all(x, counts=sent[comm.rank])
        np.testing.assert_array_equal(got, np.concatenate(expected))


def started(comm: Communicator) -> None:
    """Every collective may be started, and waited for in another order than the others do."""
    x = np.arange(6000.0) + comm.rank
    n, total = comm.size, sum(range(comm.size))
    padded = np.resize(x, 1000 * n)
    padded_by_root = np.resize(np.arange(6000.0), 1000 * n)
    works = [
        (comm.all_reduce(x, async_op=True), np.arange(6000.0) * n + total),
        (comm.broadcast(x, async_op=True, root=n - 1), np.arange(6000.0) + n - 1),
        (
            comm.all_gather(x, async_op=True),
            np.concatenate([np.arange(6000.0) + r for r in range(n)]),
        ),
        (comm.reduce_scatter(padded * 0 + 1, async_op=True), np.full(1000, float(n))),
        (
            comm.all_to_all(padded * 0 + comm.rank, async_op=True),
            np.repeat(np.arange(n) * 1.0, 1000),
        ),
        (
            comm.scatter(padded if comm.rank == 0 else None, out=np.empty(1000), async_op=True),
            padded_by_root[1000 * comm.rank :][:1000],
        ),
        (comm.barrier(async_op=True), None),
    ]
    reduced, gathered = comm.reduce(x, async_op=True), comm.gather(x[:2], async_op=True)
    for position in np.random.default_rng(comm.rank).permutation(len(works)):
        work, expected = works[position]
        result = work.wait(timeout=50)
        assert work.done()
        if expected is None:
            assert result is None
        elif isinstance(expected, dict | list):
            assert result == expected
        else:
            np.testing.assert_array_equal(result, expected)
    assert (gathered.wait() is None) == (reduced.wait() is None) == (comm.rank != 0)


def many_as_one(comm: Communicator) -> None:
    """Lists of arrays of several dtypes and shapes, in one call per dtype."""
    arrays: list[Any] = [
        np.full((2, 3), comm.rank, "f4"),
        np.full(5, comm.rank, "i8"),
        np.ones((), "f4"),
    ]
    total = sum(range(comm.size))
    results = comm.all_reduce(arrays)
    assert [(r.shape, str(r.dtype)) for r in results] == [
        ((2, 3), "float32"),
        ((5,), "int64"),
        ((), "float32"),
    ]
    assert (results[0] == total).all()
    assert (results[1] == total).all()
    assert results[2] == comm.size
    out = [np.zeros((3, 2), "f4").T, np.zeros(5, "i8"), np.zeros((), "f4")]
    work = comm.all_reduce(arrays, out=out, op="max", async_op=True)
    assert work.wait() is out
    assert (out[0] == comm.size - 1).all()
    assert (out[1] == comm.size - 1).all()
    assert out[2] == 1
    comm.broadcast(arrays, root=0, out=arrays)
    assert not arrays[0].any()
    assert not arrays[1].any()
    assert comm.all_reduce([]) == []
    assert comm.all_reduce([comm.rank, 1.5]) == [total, 1.5 * comm.size]


def lists_into_some(comm: Communicator) -> None:
    """Whether a member brings `out`, and how that lies in memory, is no matter of the others."""
    arrays = [np.full((2, 3), comm.rank, "f4"), np.full(5, comm.rank, "i8")]
    total, root = sum(range(comm.size)), comm.size - 1
    out = [np.zeros((3, 2), "f4").T, np.zeros(5, "i8")]
    reduced = comm.reduce(arrays, root=root, out=out if comm.rank == root else None)
    assert reduced is (out if comm.rank == root else None)
    for into in (None, out[:1], [np.zeros((2, 3), "f4")]):
        results = comm.all_reduce(arrays[:1], out=into if comm.rank == root else None)
        assert (results[0] == total).all()
    assert (out[0] == (total if comm.rank == root else 0)).all()


def plain_data(comm: Communicator) -> None:
    root = comm.size - 1
    got = comm.broadcast_object(FACTS if comm.rank == root else None, root=root)
    assert got == FACTS
    mine = {"rank": comm.rank, "pad": "x" * (3000 * comm.rank)}
    everybody = [{"rank": rank, "pad": "x" * (3000 * rank)} for rank in range(comm.size)]
    assert comm.all_gather_object(mine) == everybody
    gathered = comm.gather_object(mine, root=root)
    assert gathered == (everybody if comm.rank == root else None)


def scaled(comm: Communicator) -> None:
    x = np.full(1000, comm.rank + 1.0, "float32")
    total = comm.size * (comm.size + 1) / 2
    assert (comm.all_reduce(x, prescale=0.5) == 0.5 * total).all()
    assert (comm.all_reduce(x, postscale=2.0, out=x) == 2 * total).all()
    assert comm.all_reduce(1.0, op="mean", prescale=4, postscale=0.25) == 1.0
    share = comm.reduce_scatter(np.ones(comm.size * 3), postscale=3.0)
    assert (share == 3.0 * comm.size).all()


class Exported:
    """An array of a library that NumPy knows by DLPack only."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return Exported

    @staticmethod
    def from_dlpack(array: Array) -> Exported:
        return Exported(np.from_dlpack(array))


def foreign(comm: Communicator) -> None:
    """Arrays of other libraries are used in place, and results are of the same kind."""
    result = comm.all_reduce(Exported(np.ones((3, 4), "f4")[:, ::2]))
    assert isinstance(result, Exported)
    np.testing.assert_array_equal(result.array, np.full((3, 2), comm.size))
    buffer = bytearray(np.ones(4, "f4").tobytes())
    view = memoryview(buffer).cast("f")
    comm.all_reduce(view, out=view)
    assert view.tolist() == [comm.size] * 4
