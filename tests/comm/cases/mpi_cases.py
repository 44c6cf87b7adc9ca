"""Cases of the mpi transport only, alone and between hosts, as functions of one member."""

from __future__ import annotations

import gc
import resource
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.transports.hierarchical.transport import HierarchicalTransport
from allreduce.comm.transports.mpi import converted, mpi_progress
from allreduce.comm.transports.mpi.transport import MpiTransport
from allreduce.comm.transports.mpi.types import Library
from allreduce.errors import MismatchError, OutOfMemoryError, UnsupportedError
from tests.comm.cases.message_cases import many
from tests.comm.cases.operator_cases import FEW, every_type, reduces


def transport(comm: Communicator) -> MpiTransport:
    found = comm._dispatch.transport
    assert isinstance(found, MpiTransport)
    return found


def pieces(comm: Communicator) -> None:
    """With a library that counts to 599, converted types and messages travel in pieces."""
    mine = transport(comm)
    mine._library, whole = Library(mine._mpi, 599), mine._library
    converted._PIECE_BYTES, most = 4 * 599, converted._PIECE_BYTES
    try:
        halves = np.ones(1500, np.float16)
        assert (comm.all_reduce(halves) == comm.size).all()
        many(comm)
        x = np.ones(600 * comm.size)
        for call in (comm.all_reduce, comm.broadcast, comm.all_to_all, comm.reduce_scatter):
            with pytest.raises(UnsupportedError, match="counts up to 599; pass the array in pie"):
                call(x)
        mine._library = whole
        every_type(comm)
        for op, dtype in FEW:
            reduces(comm, "private", op, dtype)
    finally:
        mine._library, converted._PIECE_BYTES = whole, most


def bounded(comm: Communicator) -> None:
    """Types that MPI does not reduce are converted in pieces, while other calls are under way."""
    count = 21 << 19  # 21 MiB, which are 42 as float32; cut into 1, 2, 3, 4 or 7 shares
    x, y = (np.full(count, comm.rank + 1, np.float16) for _ in range(2))
    share = np.empty(count // comm.size, np.float16)
    words = np.ones(3, np.float32)
    tracemalloc.start()
    works = [
        comm.all_reduce(x, out=x, async_op=True),
        comm.all_reduce(words, out=words, async_op=True),
        comm.reduce_scatter(y, op="max", out=share, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20
    total = comm.size * (comm.size + 1) // 2
    assert (x == total).all()
    assert (share == comm.size).all()
    assert (words == comm.size).all()


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
    """MPI does not reveal its algorithm; plans describe only the agreement."""
    for collective, steps in (("all_reduce", 2), ("barrier", 2), ("send", 1)):
        planned = comm.plan(collective, np.ones(9), dest=0 if collective == "send" else None)
        assert (planned.algorithm, planned.sent, len(planned.steps)) == ("mpi", None, steps)
        assert "MPI decides" in planned.steps[-1]


def between_hosts(comm: Communicator) -> None:
    """Of a hierarchical one: MPI alone carries what crosses."""
    mine = comm._dispatch.transport
    assert isinstance(mine, HierarchicalTransport)
    across = {level.transport.name for level in mine._levels.values()}
    assert "mpi" in across
    assert "tcp" not in across


def late(comm: Communicator) -> None:
    """A rank that has posted a call and computes delays the others beyond their announcement."""
    work = comm.all_reduce(np.ones(1000), async_op=True)
    if comm.rank == comm.size - 1:
        time.sleep(1.5)
    assert (work.wait() == comm.size).all()


def collected(comm: Communicator) -> None:
    """A group that goes with the garbage, wherever that is collected, does not disturb another."""
    mpi, lanes = comm.split(0, transport="mpi"), comm.split(0)
    assert mpi is not None
    assert lanes is not None
    lanes.all_reduce(np.ones(1000))
    left, advance = len(mpi_progress._open), MpiTransport.advance

    def collecting(self: MpiTransport) -> None:
        MpiTransport.advance = advance  # type: ignore[method-assign]
        gc.collect()  # as may happen wherever memory is asked for
        advance(self)

    gc.disable()
    try:
        cycle: list[Any] = [lanes]
        cycle.append(cycle)
        del lanes, cycle
        MpiTransport.advance = collecting  # type: ignore[method-assign]
        assert (mpi.all_reduce(np.ones(3)) == comm.size).all()
        assert len(mpi_progress._open) < left
    finally:
        gc.enable()
    mpi.close()


def disagreeing(comm: Communicator) -> str:
    """Members that disagree all say so, and no output is touched."""
    part, out = comm.split(0), np.full(9, 5.0)
    assert part is not None
    with pytest.raises(MismatchError) as caught:
        part.all_reduce(np.ones(9), op="max" if comm.rank == comm.size - 1 else "sum", out=out)
    assert (out == 5.0).all()
    return str(caught.value)


def sliced_update(comm: Communicator) -> None:
    """Large buckets are updated in slices on request, to the bits of the plain way."""
    if comm.size == 1:  # a member without slices
        return
    import allreduce as ar  # all of it, which no other case of ranks needs
    from allreduce.reduction import sharding
    from tests.graph.update.rank_cases import Deep

    least, strategy = sharding.SHARDED_BYTES, ar.MultiWorkerMirroredStrategy()
    try:
        plain, sliced = (Deep(strategy, "adam", everywhere) for everywhere in (False, True))
        for each in (plain, sliced):
            each.run()
        assert strategy.communicator is comm
        assert not plain.ways
        assert sliced.ways
        wanted = plain.values()
        for name, value in sliced.values().items():
            np.testing.assert_array_equal(value, wanted[name], name)
    finally:
        sharding.SHARDED_BYTES = least
        ar.config.set_buckets(None)
        ar.config.set_shard_everywhere(False)
        strategy.close()
