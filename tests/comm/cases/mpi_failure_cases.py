"""Failing calls over MPI, as functions of one member of a communicator that ends with them.

Its members are ranks of `home`, a communicator that survives: no case disturbs another.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator, init
from allreduce.comm.transports.mpi import converted
from tests.comm.cases.mpi_cases import transport

PAIRS = ("something_else", "own_timeout", "interrupted")  # cases of two ranks
LAST = "completed"  # it closes the home itself
SOON_SECONDS = 25  # on a busy machine, and long before the timeout


def in_flight(home: Communicator, comm: Communicator) -> None:
    """A disagreement among calls in flight is that of the first."""
    works = [
        comm.all_reduce(np.ones(10 + (i == 3 and comm.rank == 1)), async_op=True) for i in range(6)
    ]
    with pytest.raises(errors.MismatchError) as caught:
        works[5].wait()
    assert "#3 differs: all_reduce(float64[1" in str(caught.value)
    assert "all_reduce(float64[10], op='sum') at " in str(caught.value)
    assert "all_reduce(float64[11], op='sum') at " in str(caught.value)
    with pytest.raises(errors.ClosedError):
        works[3].wait()


def something_else(home: Communicator, comm: Communicator) -> str:
    """A receive of something else fails both ends, and touches nothing."""
    out = np.full(5, 7, "f4")
    if comm.rank == 0:
        comm.send(np.ones(5), 1, tag=3)  # it is small, and has gone
        with pytest.raises(errors.MismatchError) as caught:
            comm.barrier()
    else:
        with pytest.raises(errors.MismatchError) as caught:
            comm.recv(out, tag=3)
        assert (out == 7).all()
    return str(caught.value)


def own_timeout(home: Communicator, comm: Communicator) -> None:
    """A work has its own timeout, and a receive names its peer."""
    if comm.rank == 0:
        work = comm.recv(np.zeros(3), 1, tag=0, async_op=True)
        with pytest.raises(errors.TimeoutError, match=r"after 0\.5 s: no matching call of rank 1 "):
            work.wait(timeout=0.5)


def no_room(home: Communicator, comm: Communicator) -> str:
    """A member without memory for a conversion reports it, and the others learn of it."""
    halves, usual = np.ones(1 << 24, np.float16), converted._PIECE_BYTES
    limits = resource.getrlimit(resource.RLIMIT_AS)
    converted._PIECE_BYTES = 64 << 20  # more than may lie free in the heap
    home.barrier()
    try:
        if comm.rank == 1:
            with open("/proc/self/statm") as statm:
                used = int(statm.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), limits[1]))
        with pytest.raises(errors.AllreduceError) as caught:
            comm.all_reduce(halves, out=halves)
    finally:
        converted._PIECE_BYTES = usual
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return f"{type(caught.value).__name__} {caught.value}"


def aborted(home: Communicator, comm: Communicator) -> str:
    """Waiting members learn of an abort."""
    comm.barrier()
    if comm.rank == 1:
        comm.abort("the disk is full")
    with pytest.raises(errors.AllreduceError) as caught:
        comm.barrier()
    return f"{type(caught.value).__name__} {caught.value}"


def left(home: Communicator, comm: Communicator) -> None:
    """One that left normally is reported as that, by a collective and by a receive."""
    calls: tuple[Callable[[Communicator], Any], ...] = (
        lambda part: part.barrier(),
        lambda part: part.recv(np.zeros(3), 1, tag=0),
    )
    for call in calls:
        part = home.split(0)
        assert part is not None
        part.barrier()
        began = time.monotonic()
        if part.rank == 1:
            part.close()
            continue
        with pytest.raises(errors.PeerLostError, match="rank 1 left normally"):
            call(part)
        assert time.monotonic() - began < SOON_SECONDS


def asked(home: Communicator, comm: Communicator) -> None:
    """A member that left is noticed by others that only ask whether a call is done."""
    comm.barrier()
    if comm.rank == 1:
        comm.close()
        return
    began = time.monotonic()
    work = comm.all_reduce(np.zeros(3), async_op=True)

    def ask() -> None:
        while time.monotonic() - began < SOON_SECONDS:
            work.done()
            time.sleep(0.01)

    with pytest.raises(errors.PeerLostError, match="rank 1 left normally"):
        ask()


def both_left(home: Communicator, comm: Communicator) -> None:
    """Those that left do not hide each other from a receive."""
    for source in (1, -1):
        part = home.split(0)
        assert part is not None
        part.barrier()
        began = time.monotonic()
        if part.rank:
            time.sleep(part.rank / 5)
            part.close()
            continue
        with pytest.raises(errors.PeerLostError, match=r"rank \d left normally"):
            part.recv(np.zeros(3), source)
        assert time.monotonic() - began < SOON_SECONDS


def interrupted(home: Communicator, comm: Communicator) -> None:
    """An interrupted wait kills the communicator, and none that has nothing under way."""

    def interrupt(*_: Any) -> None:
        raise InterruptedError("now")

    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport(home)._queue, "advance", interrupt)
            with pytest.raises(InterruptedError, match="now"):
                comm.all_reduce(np.ones(3))
        signal.signal(signal.SIGALRM, before)
        home.send(np.ones(1), 1)
    else:
        home.recv(np.ones(1), 0)  # it comes when the interrupt is over
        told = "rank 0 aborted .* interrupted by Int"
        with pytest.raises(errors.PeerLostError, match=told) as caught:
            comm.all_reduce(np.ones(3))
        assert not caught.value.interrupted  # it was no Ctrl-C


def completed(home: Communicator, comm: Communicator) -> None:
    """close() completes started calls and disturbs no other member."""
    out = np.zeros(300000)
    home.all_reduce(np.ones(300000), out=out, async_op=True)
    home.close()
    assert (out == comm.size).all()
    with pytest.raises(errors.ClosedError):
        home.barrier()
    assert init().all_reduce(2) == 2 * comm.size  # a new one of the same world
