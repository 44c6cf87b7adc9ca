"""The mpi transport, under mpirun."""

from __future__ import annotations

import pytest

from allreduce.comm.calls.call import Call
from allreduce.comm.registry import REGISTRY, opener
from allreduce.comm.transports.mpi.opener import open_mpi
from allreduce.comm.transports.mpi.status_board import signature
from allreduce.errors import UnsupportedError, UsageError
from tests.comm.contract import ContractOfProcesses, rows
from tests.comm.ranks import pool
from tests.comm.ranks.pool import Ranks, Runner
from tests.comm.transports.mpi.jobs import failing
from tests.harness import world_of_one


@rows("a", "aaa", torture=("aa", "aaaa", "aaaaaaa"))
class TestRanks(ContractOfProcesses):
    ranks = Ranks("mpi", pool.under_mpirun)
    times = 1  # MPICH's ranks wait by spinning: on few cores the more of them, the slower

    @pytest.mark.parametrize("case", ["pieces", "bounded", "memory", "plans", "sliced_update"])
    def test_its_own(self, run: Runner, case: str) -> None:
        run(case)


def test_after_mpis_end_a_call_is_refused_instead_of_killing_the_process() -> None:
    said = failing(
        """
from mpi4py import MPI
comm.barrier()
MPI.Finalize()
with pytest.raises(errors.ClosedError, match="has finalised MPI"):
    comm.barrier()
say("fine")
""",
        size=2,
    )
    assert said == ["fine"] * 2


def test_it_is_for_processes_that_mpi_has_started() -> None:
    assert opener("mpi") is open_mpi
    assert "mpi" in REGISTRY
    with pytest.raises(UsageError, match="comes from 'single'; start the script with mpirun"):
        open_mpi(world_of_one(), 1, name="test", timeout=5)


def test_a_process_is_one_member() -> None:
    with pytest.raises(UnsupportedError, match="is one member of the mpi transport, but brings 2"):
        open_mpi(world_of_one(), 2, name="test", timeout=5)


def test_a_signature_holds_what_has_to_agree() -> None:
    call = Call("gather", None, "int8", 9, 1, "g", counts=(4, 5))
    others = [
        Call("scatter", None, "int8", 9, 1, "g", counts=(4, 5)),
        Call("gather", None, "uint8", 9, 1, "g", counts=(4, 5)),
        Call("gather", None, "int8", 9, 0, "g", counts=(4, 5)),
        Call("gather", None, "int8", 9, 1, "g", counts=(5, 4)),
        Call("gather", None, "int8", 9, 1, "g"),
    ]
    assert len({signature(one) for one in (call, *others)}) == 6
    own = Call("all_to_all", None, "int8", 9, None, "g", counts=(4, 5), receives=(4, 1))
    peers = Call("all_to_all", None, "int8", 2, None, "g", counts=(1, 1), receives=(5, 1))
    assert signature(own) == signature(peers)


def test_an_interrupt_in_done_does_not_carry_a_call_out_twice() -> None:
    said = failing("""
from allreduce.comm.transports.mpi.calls import Collective
posted = []
real = Collective.post

def post(self):
    posted.append(self.call)
    real(self)
    if rank == 0:
        raise KeyboardInterrupt  # as Ctrl-C may, at any moment

Collective.post = post
work = comm.all_reduce(np.ones(1000), async_op=True)
ends = (KeyboardInterrupt, errors.PeerLostError)
with pytest.raises(ends[rank > 0]) as caught:
    while not work.done():
        time.sleep(0.001)
    comm.barrier()  # the others' share of it may be done
if rank == 0:
    for call in (work.done, comm.barrier):
        with pytest.raises(errors.ClosedError, match="interrupted by KeyboardInterrupt"):
            call()
else:
    assert "rank 0 aborted the communicator: a call was interrupted" in str(caught.value)
    assert caught.value.interrupted
assert len(posted) == 1, posted
say("fine")
""")
    assert said == ["fine"] * 3


def test_mpis_end_writes_to_no_array_that_was_freed_before() -> None:
    """MPI_Finalize goes on with an interrupted call's bytes, behind the end of the interpreter."""
    said = failing("""
from allreduce.comm.transports.mpi.calls import Collective
real = Collective.post

def post(self):
    real(self)
    if rank == 0:
        raise KeyboardInterrupt  # the others have begun, too
    time.sleep(1)

Collective.post = post
work = comm.all_reduce(np.ones(2_000_000), async_op=True)  # freed, it is no longer mapped
with pytest.raises(errors.PeerLostError if rank else KeyboardInterrupt):
    work.wait()
    comm.barrier()
say("fine")
""")
    assert said == ["fine"] * 3


def test_who_has_completed_its_calls_and_does_something_else_keeps_nobody_waiting() -> None:
    said = failing(
        """
from allreduce.comm.transports.mpi.mpi_progress import entered
store, large, small = world().store, np.ones(50_000), np.ones(1)
if rank == 0:
    sent = [comm.send(small, 1, tag=tag, async_op=True) for tag in range(100)]  # its cells are full
    comm.recv(large, 1)
    assert not all(work.look() for work in sent), "they do not fill the cells: send more"
    store.set("complete", b"")  # but what acknowledges it may lie in MPI
    store.get("sent", 25)
else:
    with entered:  # no thread of this rank makes room meanwhile
        work = comm.send(large, 0, async_op=True)
        store.get("complete", 25)
    work.wait()
    store.set("sent", b"")
    for tag in range(100):
        comm.recv(small, 0, tag=tag)
comm.barrier()
say("fine")
""",
        size=2,
    )
    assert said == ["fine"] * 2


def test_several_threads_may_close_beside_one_that_receives_in_vain() -> None:
    said = failing("""
import threading
works = [comm.all_reduce(np.full(3000, 1.0 + i), async_op=True) for i in range(20)]
if rank == 1:
    time.sleep(0.5)
raised = []
def close():
    try:
        comm.close()
    except BaseException as error:
        raised.append(repr(error))
def receive():
    with pytest.raises(errors.ClosedError, match="is closed"):
        received.wait()
    raised.append("closed")
received = comm.recv(np.zeros(3), rank, async_op=True)
threads = [threading.Thread(target=target) for target in (receive, close, close, close)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert raised == ["closed"]
assert all((work.wait() == 3 * (1.0 + i)).all() for i, work in enumerate(works))
say("fine")
""")
    assert said == ["fine"] * 3


@pytest.mark.torture  # the leader stays for the others for 10 s
def test_the_normal_end_of_the_leaders_host_disturbs_no_call_that_it_has_made() -> None:
    said = failing(
        """
work = comm.gather(np.ones(4) * rank, root=1, async_op=True)
if rank == 2:
    time.sleep(14)
result = work.wait()
assert result is None if rank != 1 else result.sum() == 12
say("fine")
""",
        timeout=30,
    )
    assert said == ["fine"] * 3
