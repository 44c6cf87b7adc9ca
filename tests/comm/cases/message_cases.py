"""Cases of sends and recvs of every transport, as functions of one member."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce import ANY
from allreduce.comm import Communicator
from allreduce.comm.arguments.messages import Receive
from tests.comm.cases.collective_cases import Array, whole
from tests.comm.cases.exchanges import Exported

SIZES = (0, 1, 500, 4097, 250001)  # the last ones too large to travel at once


def numbered(sender: int, number: int, length: int) -> Array:
    """Return values that identify the sender, and the number of its message."""
    return np.arange(length, dtype=np.int64) + sender * 1000003 + number * 1009


def receiving(comm: Communicator, out: Array, *where: int) -> Receive:
    work = comm.recv(out, *where, async_op=True)
    assert isinstance(work, Receive)
    return work


def ring(comm: Communicator) -> None:
    """Every size to the next member, of all kinds of memory; `wait` gives the caller's array."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in SIZES:
        for dtype in ("float32", "float16", "complex128", "bool", "uint8"):
            work = comm.send(whole(length, dtype, comm.rank), to, tag=5, async_op=True)
            out = np.empty(length, dtype)
            assert comm.recv(out, source, 5) is out
            np.testing.assert_array_equal(out, whole(length, dtype, source))
            assert work.wait() is None


def symmetric(comm: Communicator) -> None:
    """Messages in memory of `comm.empty` and in slices of it, also after it was freed here."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in (3, 60001, 900001):
        memory = comm.empty(length + 7, "int64")
        x = memory[7:]
        x[:] = numbered(comm.rank, 1, length)
        work = comm.send(x, to, async_op=True)
        if comm.rank % 2 == 0:
            del x, memory
        out = np.zeros(length, np.int64)
        received = receiving(comm, out)
        received.wait()
        assert received.source == source
        np.testing.assert_array_equal(out, numbered(source, 1, length))
        work.wait()
        comm.barrier()


def tags(comm: Communicator) -> None:
    """Messages are found by their tags, in another order than that in which they were sent."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    count = 40  # more than a receiver keeps copies of
    sends = [
        comm.send(numbered(comm.rank, tag, 3 + tag * 50), to, tag, async_op=True)
        for tag in range(count)
    ]
    for tag in reversed(range(count)):
        out = np.zeros(3 + tag * 50, np.int64)
        comm.recv(out, source, tag)
        np.testing.assert_array_equal(out, numbered(source, tag, out.size))
    for work in sends:
        work.wait()


def order(comm: Communicator) -> None:
    """Messages from one member under one tag arrive in order, whatever their size."""
    lengths = [(3, 100000, 700)[i % 3] for i in range(30)]
    if comm.rank != 0:
        for number, length in enumerate(lengths):
            comm.send(numbered(comm.rank, number, length), 0, tag=2)
        return
    for source in range(1, comm.size):
        for number, length in enumerate(lengths):
            out = np.zeros(length, np.int64)
            comm.recv(out, source)
            np.testing.assert_array_equal(out, numbered(source, number, length))


def anybody(comm: Communicator) -> None:
    """Any source and any tag: every message comes once, each sender's in its order."""
    each = 25
    if comm.rank != 0:
        for number in range(each):
            comm.send(numbered(comm.rank, number, 900), 0, tag=number % 4)
        return
    seen = dict.fromkeys(range(1, comm.size), 0)
    for _ in range(each * (comm.size - 1)):
        out = np.zeros(900, np.int64)
        work = receiving(comm, out, ANY, ANY)
        assert work.wait() is out
        number = seen[work.source]
        assert work.tag == number % 4
        np.testing.assert_array_equal(out, numbered(work.source, number, 900))
        seen[work.source] += 1
    assert set(seen.values()) <= {each}


def crossing(comm: Communicator) -> None:
    """Big messages both ways between all pairs at once, and by turns without any handle."""
    length = 300007
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [comm.send(numbered(comm.rank, to, length), to, tag=1, async_op=True) for to in others]
    outs = [np.zeros(length, np.int64) for _ in others]
    works = [receiving(comm, out, other, 1) for out, other in zip(outs, others, strict=True)]
    for source, work in reversed(list(zip(others, works, strict=True))):
        np.testing.assert_array_equal(work.wait(), numbered(source, comm.rank, length))
    for send in sends:
        send.wait()
    out = np.zeros(length, np.int64)
    for other in others:
        if comm.rank < other:
            comm.send(numbered(comm.rank, 3, length), other)
            comm.recv(out, other)
        else:
            comm.recv(out, other)
            comm.send(numbered(comm.rank, 3, length), other)
        np.testing.assert_array_equal(out, numbered(other, 3, length))


def oneself(comm: Communicator) -> None:
    for length in SIZES:
        x = numbered(comm.rank, length, length)
        work = comm.send(x, comm.rank, tag=1, async_op=True)
        np.testing.assert_array_equal(comm.recv(np.zeros_like(x), comm.rank, 1), x)
        work.wait()
        out = np.zeros_like(x)
        received = receiving(comm, out)
        comm.send(x, comm.rank, tag=9)
        np.testing.assert_array_equal(received.wait(), x)
        assert (received.source, received.tag) == (comm.rank, 9)


def many(comm: Communicator) -> None:
    """Hundreds of messages between all members, waited for in an order of each member's own."""
    works: list[tuple[Any, Any, int]] = []
    for number in range(60):
        length = (0, 2, 600, 40000)[number % 4]
        for other in range(comm.size):
            out = np.zeros(length, np.int64)
            works.append((receiving(comm, out, other, number), other, number))
            x = numbered(comm.rank, number, length)
            works.append((comm.send(x, other, number, async_op=True), None, number))
    for position in np.random.default_rng(comm.rank).permutation(len(works)):
        work, source, number = works[position]
        result = work.wait(timeout=50)
        assert work.done()
        if source is not None:
            np.testing.assert_array_equal(result, numbered(source, number, result.size))


def among_collectives(comm: Communicator) -> None:
    """Messages have no place in the order of the collectives, and neither holds up the other."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    works: list[tuple[Any, Array]] = []
    for number in range(12):
        x = np.full(30000, comm.rank + number, np.int64)
        length = (5, 70000)[number % 2]
        out = np.zeros(length, np.int64)
        if (comm.rank + number) % 2:  # one after the other here, the other way round elsewhere
            works.append((receiving(comm, out, source, number), numbered(source, number, length)))
        total = np.full(30000, sum(range(comm.size)) + number * comm.size)
        works.append((comm.all_reduce(x, async_op=True), total))
        comm.send(numbered(comm.rank, number, length), to, number, async_op=True)
        if not (comm.rank + number) % 2:
            works.append((receiving(comm, out, source, number), numbered(source, number, length)))
    for position in np.random.default_rng(comm.rank).permutation(len(works)):
        work, expected = works[position]
        np.testing.assert_array_equal(work.wait(), expected)
    comm.barrier()


def unclaimed(comm: Communicator) -> None:
    """Unmatched messages delay neither others nor collectives."""
    if comm.size == 1:
        return
    last = comm.size - 1
    lengths = [10] * 100 + [200000] * 10
    if comm.rank == 0:
        sends = [
            comm.send(numbered(0, number, length), last, tag=8, async_op=True)
            for number, length in enumerate(lengths)
        ]
        comm.send(numbered(0, 500, 300000), last, tag=1)
        comm.barrier()
        for work in sends:
            work.wait()
    elif comm.rank == last:
        out = np.zeros(300000, np.int64)
        np.testing.assert_array_equal(comm.recv(out, 0, 1), numbered(0, 500, 300000))
        comm.barrier()
        for number, length in enumerate(lengths):
            out = np.zeros(length, np.int64)
            np.testing.assert_array_equal(comm.recv(out, 0, 8), numbered(0, number, length))
    else:
        comm.barrier()


def shapes(comm: Communicator) -> None:
    """Strided, many-dimensional, zero-dimensional and foreign arrays, and numbers."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    base = np.arange(24.0).reshape(2, 3, 4) + comm.rank
    expected = np.arange(24.0).reshape(2, 3, 4) + source
    target = np.zeros((2, 3, 8))[..., ::2]
    pairs: list[tuple[Any, Any, Any]] = [
        (base.T, np.zeros((4, 3, 2)), expected.T),
        (base[:, ::2], np.zeros((4, 4)), expected[:, ::2].reshape(4, 4)),
        (base, target, expected),
        (np.float64(comm.rank), np.zeros(()), np.array(float(source))),
        (comm.rank, np.zeros((), np.int64), np.array(source)),
        (np.zeros((0, 3)), np.zeros((3, 0)), np.zeros((3, 0))),
    ]
    for x, out, wanted in pairs:
        comm.send(x, to, async_op=True)
        assert comm.recv(out, source) is out
        np.testing.assert_array_equal(out, wanted)
    comm.send(Exported(base), to, async_op=True)
    exported = Exported(np.zeros((2, 3, 4)))
    assert comm.recv(exported, source) is exported
    np.testing.assert_array_equal(exported.array, expected)
    view = memoryview(bytearray(8 * 24)).cast("d")
    comm.send(base, to, async_op=True)
    comm.recv(view, source)
    np.testing.assert_array_equal(np.asarray(view), expected.ravel())
    comm.barrier()
