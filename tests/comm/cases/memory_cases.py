"""Large calls on arrays that a transport cannot use in place: results, and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from tests.comm.cases.collective_cases import Array

MIB = 1 << 20
SHAPE = (3360, 2497)  # 32 MiB of float32; rows for 1, 2, 3, 4 or 7 members
BOUND = 24 * MIB  # what a transport works in, and what the allocator keeps

Call = Callable[[], Any]


def spaced(shape: tuple[int, int]) -> Array:
    """Return an array of ones between elements that are not its own."""
    return np.ones((shape[0], 2 * shape[1]), np.float32)[:, ::2]


def large(comm: Communicator) -> None:
    """Large lists, scaled arrays and plain data, however the arrays lie on each member."""
    odd, root, mine = comm.rank % 2 == 1, comm.size - 1, comm.rank + 1
    total = comm.size * (comm.size + 1) // 2
    a, b = (spaced((1009, 1200)) if odd else np.ones((1009, 1200), np.float32) for _ in range(2))
    words = np.arange(9 << 17).reshape(9, -1).T
    for array, factor in ((a, mine), (b, 2 * mine)):
        array *= factor
    arrays = [a, b, mine * words]
    told = comm.broadcast(arrays, root=root)
    for got, wanted in zip(told, (comm.size, 2 * comm.size, comm.size * words), strict=True):
        assert (got == wanted).all()
    out = [b, a, arrays[2]] if odd else None  # each other's input
    work = comm.all_reduce(arrays, out=out, async_op=True)
    for got, wanted in zip(work.wait(), (total, 2 * total, total * words), strict=True):
        assert (got == wanted).all()
    rows = [1 + 2000 * (member == root) for member in range(comm.size)]
    x = np.ones((sum(rows), 1200), np.float32)
    into = spaced((rows[comm.rank], 1200)) if odd else None
    share = comm.reduce_scatter(x, counts=rows, prescale=0.5, postscale=3, out=into)
    assert share.shape == (rows[comm.rank], 1200)
    assert (share == 1.5 * comm.size).all()
    reduced = comm.reduce(x.T, op="mean", root=root, prescale=0.5)
    assert (reduced is None) == (comm.rank != root)
    assert reduced is None or (reduced == 0.5).all()
    data = {"bytes": bytes(9 * MIB), "more": [mine]}
    got = comm.broadcast_object(data if comm.rank == root else None, root=root)
    assert got == {**data, "more": [comm.size]}


def extra_memory(comm: Communicator) -> None:
    """Arrays of any size are only copied where the table in docs/collectives.md says so."""
    x, gaps = np.ones(SHAPE, np.float32), spaced(SHAPE)
    for said, call in _bounded(comm, x, gaps):
        taken = extra(call, [x, gaps])
        assert taken < BOUND, f"{said}: {taken / MIB:.1f} MiB besides"


def _bounded(comm: Communicator, x: Array, gaps: Array) -> list[tuple[str, Call]]:
    """List calls, whose roots are all the first member, on which alone strides cost nothing.

    Where a copy of strides goes is the same on all transports: one tests it.
    """
    first = comm.rank == 0
    one = np.ones(1)
    calls: list[tuple[str, Call]] = [
        ("strided all_reduce", lambda: comm.all_reduce(gaps)),
        ("strided broadcast into out", lambda: comm.broadcast(x if first else gaps, out=x)),
        ("strided gather", lambda: comm.gather(gaps if first else x)),
        ("scaled all_reduce", lambda: comm.all_reduce(x, prescale=0.5)),
        ("large arrays of a list", lambda: comm.all_reduce([x, one, one], out=[x, one, one + 1])),
        ("reduce of a list", lambda: comm.reduce([x, 1.0])),
    ]
    return calls if comm.transport == "shared" else calls[3:]


def extra(call: Call, known: list[Array]) -> int:
    """Make a call; return the peak of the bytes that it allocated besides its result.

    Args:
        call: The call.
        known: Arrays that are there already, and may be what it gives.
    """
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # have the kernel forget the highest there was
    results = call()
    highest = _status("VmHWM")
    own = results if isinstance(results, list) else [results]
    new = [each for each in own if each is not None and not any(each is one for one in known)]
    return highest - before - sum(np.asarray(each).nbytes for each in new)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
