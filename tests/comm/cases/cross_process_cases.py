"""Cases of members that read each other's memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from typing import Any

import numpy as np

from allreduce.comm import Communicator, world
from allreduce.comm.transports import native
from allreduce.events import logger
from tests.comm.cases.collective_cases import Array, whole
from tests.comm.ranks.tables import SOON, before_the_table

_SECRET = 447  # memfd_secret, on all machines


def way_of(comm: Communicator, collective: str, nbytes: int) -> str:
    """Say which way a call goes."""
    return comm.plan(collective, np.empty(nbytes, "uint8")).algorithm


def secret(length: int) -> Array:
    """Return memory that no other process can read; ordinary memory where there is none such."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(_SECRET, 0)
    if fd < 0:  # a kernel without it, or a limit on locked memory
        return np.empty(length)
    try:
        os.ftruncate(fd, length * 8)
        return np.frombuffer(mmap.mmap(fd, length * 8))
    finally:
        os.close(fd)


def copies(comm: Communicator) -> None:
    """Every call that only copies: of all lengths, strided, into `out`, and in place."""
    size, me, root = comm.size, comm.rank, comm.size - 1
    for length in (0, 1000, 30011):
        inputs = [whole(length * size, "float64", member) for member in range(size)]
        shares = [values[:length] for values in inputs]
        joined, spread = np.concatenate(shares), np.repeat(inputs[me], 2)[::2]
        np.testing.assert_array_equal(comm.all_gather(spread[:length]), joined)
        out = np.empty((size * length, 2))[:, 0]
        comm.all_gather(shares[me], out=out)
        np.testing.assert_array_equal(out, joined)
        out[...] = -1
        own = out[me * length :][:length]
        own[...] = shares[me]
        gathered = comm.gather(own, root=root, out=out)
        if me == root:
            np.testing.assert_array_equal(gathered, joined)
        mine = comm.scatter(spread if me == root else None, root=root)
        np.testing.assert_array_equal(mine, inputs[root][me * length :][:length])
        expected = np.concatenate([values[me * length :][:length] for values in inputs])
        np.testing.assert_array_equal(comm.all_to_all(spread), expected)
        works = [comm.broadcast(spread, root=one, async_op=True) for one in range(size)]
        for one in reversed(range(size)):
            np.testing.assert_array_equal(works[one].wait(), inputs[one])
        comm.broadcast(spread, root=root, out=spread)
        np.testing.assert_array_equal(spread, inputs[root])


def withheld(comm: Communicator) -> bool:
    """An input that only its owner can read goes through the rings, on all members."""
    inputs = [whole(3000 * comm.size, "float64", member) for member in range(comm.size)]
    last = comm.size - 1
    x = secret(3000 * comm.size) if comm.rank == last else np.empty(3000 * comm.size)
    x[...] = inputs[comm.rank]
    work = comm.all_gather(x, async_op=True)
    np.testing.assert_array_equal(work.wait(), np.concatenate(inputs))
    np.testing.assert_array_equal(comm.broadcast(x, root=last), inputs[last])
    shares = [values.reshape(comm.size, -1)[comm.rank] for values in inputs]
    np.testing.assert_array_equal(comm.all_to_all(x), np.concatenate(shares))
    np.testing.assert_array_equal(comm.broadcast(x, root=0), inputs[0])
    return True


def owned_again(comm: Communicator) -> None:
    """After its call a member may write to its input, and free it: all others have read it."""
    size, me = comm.size, comm.rank
    x = np.empty(100_000 * size)
    out = np.empty(100_000 * size * size)
    for number in range(30):
        x[...] = number * size + me
        comm.all_gather(x, out=out)
        x[...] = -1
        expected = number * size + np.arange(size)
        assert (expected == out.reshape(size, -1)[:, ::1000].T).all()
        root = number % size
        got = comm.broadcast(np.full(100_000, number + me), root=root)
        assert (got == number + root).all()


def slow(comm: Communicator) -> list[str]:
    """Return the warnings of a call that all members have made, and that one does not drive."""
    said: list[str] = []
    handler, usual = logging.Handler(logging.WARNING), native.WARN_SECONDS
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        native.WARN_SECONDS = 0.2 + 30 * comm.rank
        work = comm.all_reduce(np.ones(2_000_000), async_op=True)
        if comm.rank:
            world().store.set(f"slow/{comm.rank}", b"")
        for other in range(1, comm.size) if comm.rank == 0 else ():
            world().store.get(f"slow/{other}", 25)
        if comm.rank == 1:
            time.sleep(1.5)
        assert work.wait()[0] == comm.size
    finally:
        native.WARN_SECONDS = usual
        logger.removeHandler(handler)
    return said


def cross_process(comm: Communicator, name: str, *arguments: Any) -> Any:
    """Run a case with every copy read from the other processes."""
    from tests.comm.ranks.pool import case  # which imports this module

    with before_the_table(SOON):
        small = comm.split(0)
    assert small is not None
    with small:
        return case(name)(small, *arguments)
