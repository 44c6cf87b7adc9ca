"""Other threads and forked children that must not call get an error and disturb no call."""

from __future__ import annotations

from tests.comm.transports.mpi.jobs import job

PROGRAM = """
import contextlib, itertools, os, threading, time, warnings
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
own = {"HOST": "ab"[rank], "ACROSS": "mpi", "TCP_INTERFACE": "127.0.0.1"}
os.environ.update({f"ALLREDUCE_{name}": value for name, value in own.items()})

import numpy as np
from allreduce import errors
from allreduce.comm import init
from allreduce.comm.transports.mpi.mpi_progress import entered

warnings.simplefilter("ignore")  # of forks beside threads
mpi = init(transport="mpi", timeout=20)
lanes, tcp = (mpi.split(0, transport=name) for name in ("hierarchical", "tcp"))
os.environ["ALLREDUCE_ACROSS"] = "tcp"
plain = mpi.split(0, transport="hierarchical")
transports = [one._dispatch.transport for one in (mpi, lanes, tcp, plain)]
assert [one.any_thread for one in transports] == [False, False, True, True]

def refusal(attempt):
    try:
        return str(attempt())
    except errors.UsageError as error:
        return str(error)

def of_thread(attempt):
    said = []
    thread = threading.Thread(target=lambda: said.append(refusal(attempt)), daemon=True)
    thread.start()
    thread.join(25)
    return said and "calls of the main thread only" in said[0]

def of_child(attempt):
    child = os.fork()
    if child == 0:
        os._exit("was forked from the process" not in refusal(attempt))
    until = time.monotonic() + 25
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False

def of_child_beside(locks, attempt):  # which are held by a thread that the child lacks
    said = []
    with contextlib.ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        thread = threading.Thread(target=lambda: said.append(of_child(attempt)))
        thread.start()
        thread.join()
    return said[0]

for comm in (mpi, lanes, tcp, plain):
    finished = comm.all_reduce(np.ones(5), async_op=True)
    while not finished.done():
        time.sleep(0.001)
    if rank == 0:
        work = comm.all_gather(np.full(1, rank), async_op=True)
        later = comm.all_reduce(np.ones(1000), async_op=True)
        attempts = work.done, work.wait, later.done, comm.barrier, lambda: comm.gather_object(0)
        for attempt in (*attempts, lambda: comm.local):
            assert of_child(attempt), comm
            assert comm in (tcp, plain) or of_thread(attempt), comm
        later.__dict__["_waiting"] = threading.RLock()  # as a thread has made it that waits
        locks = [later._waiting, comm._dispatch.lock, comm._groups._making]
        locks.append(entered)
        locks += [comm._dispatch.transport._lock] if comm is not mpi else []
        for attempt in (later.wait, lambda: (finished.wait(), comm.barrier()), lambda: comm.local):
            assert of_child_beside(locks, attempt), comm
    MPI.COMM_WORLD.Barrier()
    if rank == 1:
        work = comm.all_gather(np.full(1, rank), async_op=True)
        later = comm.all_reduce(np.ones(1000), async_op=True)
    assert work.wait().tolist() == [0, 1]
    assert (later.wait() == 2).all()

# Any waiting thread drives all calls.
for pair in itertools.combinations((mpi, lanes, tcp, mpi.split(0)), 2):
    works = [comm.all_gather(np.full(1, rank), async_op=True) for comm in pair]
    for work in works if rank else reversed(works):
        assert work.wait().tolist() == [0, 1]
    works = [comm.all_gather(np.full(1, rank), async_op=True) for comm in pair]
    order = works if rank else works[::-1]
    while not all(work.done() for work in order):
        pass

# The thread that listens between steps drives nothing that it must not.
from allreduce.graph.consistency import rank_exchange
rank_exchange._POLL_SECONDS = 0.0
for ranks, steps in ((mpi, lanes), (tcp, mpi)):
    if rank == 1:
        time.sleep(0.15)
    found = rank_exchange.exchange_between_steps(ranks, [steps], "this", np.full(2, rank))
    assert found.tolist() == [[0, 0], [1, 1]]
os.write(1, b"fine\\n")
"""


def test_threads_that_mpi_does_not_take_and_forked_children_are_refused_and_harm_nothing() -> None:
    result = job(PROGRAM, 2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["fine"] * 2, result
