"""A rank that runs the cases of CPU collectives with its arrays on its GPU.

python -m allreduce.run -n 3 tests/gpu/comm/collective_cases.py CASE…
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import allreduce as ar
from allreduce import devices
from allreduce.comm import Communicator
from allreduce.comm.transports.nccl.carries import OPERATORS, TYPES
from tests.comm.cases.collective_cases import whole
from tests.comm.cases.operator_cases import SENSE, reduces
from tests.comm.ranks.pool import case

_GROUPS = ("split", "group")
_MOVED = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter", "broadcast"),
    "all_to_all",
)


class OnGpu:
    """A communicator of NumPy arrays whose calls run on copies of these on a GPU."""

    def __init__(self, comm: Communicator, gpu: str = "GPU:0") -> None:
        self._comm, self._gpu = comm, devices.lookup(gpu)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)
        if name in _GROUPS:
            return lambda *given, **named: self._group(method(*given, **named))
        if name not in _MOVED:
            return method

        def call(x: Any, *given: Any, out: Any = None, async_op: bool = False, **named: Any) -> Any:
            if isinstance(x, int | float):  # of the host
                return method(x, *given, out=out, async_op=async_op, **named)
            there, target = self._pair(x, out)
            result = method(there, *given, out=target, async_op=async_op, **named)
            work = Moved(result, target, out)
            return work if async_op else work.wait()

        return call

    def send(self, x: Any, dest: int, *, async_op: bool = False) -> Any:
        return self._comm.send(self._there(x), dest, async_op=async_op)

    def recv(self, out: Any, source: int, *, async_op: bool = False) -> Any:
        target = self._there(out)
        work = Moved(self._comm.recv(target, source, async_op=True), target, out)
        return work if async_op else work.wait()

    def __enter__(self) -> OnGpu:
        return self

    def __exit__(self, *_: object) -> None:
        self._comm.close()

    @staticmethod
    def _group(made: Communicator | None) -> OnGpu | None:
        return None if made is None else OnGpu(made)

    def _pair(self, x: Any, out: Any) -> tuple[Any, Any]:
        """Copy both to the GPU; parts of one array stay parts of one."""
        if isinstance(x, list) and x is out:
            return (both := self._there(x)), both
        if isinstance(x, list) or x is None or out is None or not np.shares_memory(x, out):
            return self._there(x), self._there(out)
        larger, smaller = (x, out) if x.size > out.size else (out, x)
        whole = self._there(larger)
        first = (smaller.ctypes.data - larger.ctypes.data) // larger.itemsize
        part = whole.reshape(-1)[first : first + smaller.size].reshape(smaller.shape)
        return (whole, part) if larger is x else (part, whole)

    def _there(self, array: Any) -> Any:
        if array is None:
            return None
        if isinstance(array, list):
            return [self._there(each) for each in array]
        array = np.asarray(array)
        made = self._gpu.allocate(array.nbytes).array(array.dtype, array.shape)
        devices.write(made, array)
        return made


class Moved:
    """A call's work, whose result is copied back."""

    def __init__(self, work: Any, target: Any, out: Any) -> None:
        self._work, self._target, self._out = work, target, out

    def wait(self, timeout: float | None = None) -> Any:
        waits = hasattr(self._work, "wait")
        result = self._work.wait(timeout) if waits else self._work
        if result is None:
            return None
        if self._out is None:
            whole = isinstance(result, list)
            return [devices.read(each) for each in result] if whole else devices.read(result)
        assert result is self._target
        pairs = (
            zip(self._out, result, strict=True)
            if isinstance(result, list)
            else [(self._out, result)]
        )
        for out, each in pairs:
            out[...] = devices.read(each)
        return self._out

    def done(self) -> bool:
        finished: bool = self._work.done()
        return finished


def carried_pairs(comm: Any) -> None:
    """Reduce every type by every operator that NCCL has for it."""
    for op, dtype in SENSE:
        if dtype in TYPES and op in OPERATORS and op.startswith("logical") == (dtype == "bool"):
            reduces(comm, "private", op, dtype)


def lists(comm: Any) -> None:
    """Lists of arrays of several dtypes and shapes, as one call: with and without outputs."""
    arrays = [np.full((2, 3), comm.rank, "f4"), np.full(70_001, comm.rank, "i8"), np.ones((), "f4")]
    total, root = sum(range(comm.size)), comm.size - 1
    results = comm.all_reduce(arrays)
    assert [(each.shape, str(each.dtype)) for each in results] == [
        *(((2, 3), "float32"), ((70_001,), "int64"), ((), "float32")),
    ]
    for result, expected in zip(results, (total, total, comm.size), strict=True):
        assert (result == expected).all()
    out = [np.zeros_like(each) for each in arrays]
    work = comm.all_reduce(arrays, out=out, op="max", async_op=True)
    assert work.wait() is out
    for each, expected in zip(out, (root, root, 1), strict=True):
        assert (each == expected).all()
    scaled = comm.all_reduce([arrays[0], arrays[2]], op="mean", prescale=3.0)
    np.testing.assert_allclose(scaled[0], 3 * total / comm.size, rtol=1e-6)
    reduced = comm.reduce(arrays, root=root, out=out if comm.rank == root else None)
    assert reduced is (out if comm.rank == root else None)
    comm.broadcast(arrays, root=0, out=arrays)
    assert not arrays[0].any()
    assert not arrays[1].any()


def messages(comm: Any) -> None:
    """Around a ring, in which rank 0 sends first: every size, type and kind of wait."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in (0, 1, 500, 250_001):
        for dtype in ("float32", "float16", "complex128", "bool", "int64"):
            out, mine = np.empty(length, dtype), whole(length, dtype, comm.rank)
            if comm.rank == 0:
                assert comm.send(mine, to) is None
            assert comm.recv(out, source) is out
            if comm.rank:
                work = comm.send(mine, to, async_op=True)
                assert work.wait() is None
            np.testing.assert_array_equal(out, whole(length, dtype, source))


def messages_in_order(comm: Any) -> None:
    """Many messages from each to rank 0, between collectives and in groups."""
    with comm.split(0, -comm.rank) as part:
        last = part.size - 1  # rank 0 of comm
        for number in range(12):
            length = (3, 100_000, 700)[number % 3]
            work = comm.all_reduce(np.full(length, number), async_op=True)
            if part.rank != last:
                part.send(np.full(length, 100 * part.rank + number), last)
            for sender in range(last) if part.rank == last else ():
                received = part.recv(np.zeros(length, np.int64), sender)
                assert (received == 100 * sender + number).all()
            assert (work.wait() == number * comm.size).all()


def every_call_of_a_group(comm: Any) -> None:
    """Groups of two in reverse, and of one: every collective knows the new numbers."""
    ranks = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    first, n = ranks[0], len(ranks)
    with comm.split(comm.rank % 2, -comm.rank) as part:
        assert (part.size, part.rank, part.transport) == (n, ranks.index(comm.rank), "nccl")
        x, rows = np.full(3000, comm.rank), np.repeat(ranks, 3000)
        assert (part.all_reduce(x, op="max") == first).all()
        assert (part.broadcast(x, root=n - 1) == ranks[-1]).all()
        np.testing.assert_array_equal(part.all_gather(x), rows)
        assert (part.reduce_scatter(np.full(2 * n, comm.rank)) == sum(ranks)).all()
        np.testing.assert_array_equal(part.all_to_all(np.full(n, comm.rank)), ranks)
        gathered, reduced = part.gather(x, root=0), part.reduce(x, root=0)
        given = part.scatter(rows if part.rank == 0 else None, root=0, out=np.zeros(3000, int))
        assert (given == comm.rank).all()
        if part.rank == 0:
            np.testing.assert_array_equal(gathered, rows)
            assert (reduced == sum(ranks)).all()
        half = part.all_reduce([x, np.ones(3, "f4")])
        assert (half[1] == n).all()
    assert (comm.all_reduce(np.ones(3)) == comm.size).all()


def works_of_groups(comm: Any) -> None:
    """Works of a parent and of its groups, waited for in an order of each member's own."""
    groups = [comm, comm.split(comm.rank % 2), comm.split(0)]
    works = []
    for number in range(30):
        group, length = groups[number % 3], (4, 60_000)[number % 2]
        work = group.all_reduce(np.full(length, number), async_op=True)
        works.append((work, number * group.size))
    for position in np.random.default_rng(comm.rank).permutation(len(works)):
        work, expected = works[position]
        assert (work.wait(timeout=50) == expected).all()
    for group in groups[1:]:
        group.close()


def run_case(name: str, comm: OnGpu) -> None:
    """Run a case of this file, or of the CPUs' transports."""
    function = globals().get(name) or case(name)
    function(comm, *(["private"] if function.__code__.co_argcount == 2 else []))


def main() -> None:
    comm: Any = ar.init(timeout=30)
    assert comm.transport == "nccl"
    for name in sys.argv[1:]:
        run_case(name, OnGpu(comm))
        if comm.rank == 0:
            print(name, flush=True)
    comm.close()


if __name__ == "__main__":
    main()
