"""The mpi transport: what every transport does, in jobs under mpirun, and what is its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allreduce.comm.call import Call
from allreduce.comm.mpi_news import signature
from allreduce.comm.mpi_opener import open_mpi
from allreduce.comm.transports import REGISTRY, opener
from allreduce.errors import UnsupportedError, UsageError
from tests.cluster.processes import mpirun
from tests.comm import message_cases
from tests.harness import Result, run_ranks, world_of_one

SHARED = (  # of tests.comm.cases; "bits" is the shared transport's promise alone
    "every_length:private",
    "every_length:symmetric",
    "every_pair:private",
    "slices",
    "in_flight",
    "dropped",
    "numbers",
    "layouts",
    "many_small",
)
MESSAGES = (*message_cases.CASES, "symmetric")
OWN = (
    "moved",
    "reduced",
    "halves",
    "messages",
    "pieces",
    "equal_bits",
    "many_in_flight",
    "from_threads",
    "memory",
    "plans",
)
JOB = """
import sys, traceback
from allreduce.comm import init
from tests.comm import mpi_cases
from tests.comm.pool import case

comm = init(transport="mpi", timeout=60)
for text in {cases!r}:
    name, *arguments = text.split(":")
    (getattr(mpi_cases, name, None) or case(name))(comm, *arguments)
    comm.barrier()  # a recv of any source would take what the next case sends
    print(f"{{text}} passed on {{comm.rank}} over {{comm.transport}}", flush=True)
comm.close()
"""
FAILURES = """
import numpy as np, os, sys, time
import pytest
from allreduce import errors
from allreduce.comm import init
from tests.comm.mpi_cases import start, transport

comm = init(transport="mpi", timeout={timeout})
rank, size = comm.rank, comm.size
began = time.monotonic()

def say(*words):  # in one piece, whoever else writes
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def job(program: str, size: int, timeout: float = 60) -> Result:
    """Run a program under MPICH's mpirun, or skip the test where that is not installed."""
    mpirun(size, Path())
    (result,) = run_ranks(program, size, launcher="mpirun", timeout=timeout)
    return result


def failing(lines: str, size: int = 3, timeout: float = 20) -> list[str]:
    """Run lines that end with `say`, and return what each rank said."""
    result = job(FAILURES.format(timeout=timeout) + lines, size)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stdout.splitlines() if line]
    assert len(said) == size, result
    return sorted(said)


class TestCases:
    """All cases of one size in one job: what it printed before it failed has passed."""

    @pytest.fixture(scope="class", params=[1, 2, 3])
    @classmethod
    def done(cls, request: pytest.FixtureRequest) -> tuple[int, Result]:
        size: int = request.param
        return size, job(JOB.format(cases=SHARED + MESSAGES + OWN), size, timeout=110)

    @pytest.mark.parametrize("case", SHARED + MESSAGES + OWN)
    def test_case(self, done: tuple[int, Result], case: str) -> None:
        size, result = done
        for rank in range(size):
            assert f"{case} passed on {rank} over mpi" in result.stdout, result.stderr

    def test_the_job_ends_well(self, done: tuple[int, Result]) -> None:
        assert done[1].returncode == 0, done[1].stderr


@pytest.mark.parametrize(
    ("even", "odd", "first", "second"),
    [
        (
            "comm.all_reduce(x, out=out)",
            "comm.all_reduce(x, op='max', out=out)",
            "all_reduce(float64[9], op='sum')",
            "all_reduce(float64[9], op='max')",
        ),
        (
            "comm.all_reduce(x, out=out)",
            "comm.all_reduce(x.view('int64'), out=out.view('int64'))",
            "all_reduce(float64[9], op='sum')",
            "all_reduce(int64[9], op='sum')",
        ),
        (
            "comm.all_reduce(x.reshape(3, 3), out=out.reshape(3, 3))",
            "comm.all_reduce(x.reshape(9, 1), out=out.reshape(9, 1))",
            "all_reduce(float64[3, 3], op='sum')",
            "all_reduce(float64[9, 1], op='sum')",
        ),
        (
            "comm.all_reduce([x[:6], x[6:]], out=[out[:6], out[6:]])",
            "comm.all_reduce([x[:3], x[3:]], out=[out[:3], out[3:]], prescale=2)",
            "all_reduce([float64[6], float64[3]], op='sum')",
            "all_reduce([float64[3], float64[6]], op='sum', prescale=2.0)",
        ),
        (
            "comm.broadcast(x, root=0, out=out)",
            "comm.broadcast(x, root=2, out=out)",
            "broadcast(float64[9], root=0)",
            "broadcast(float64[9], root=2)",
        ),
        (
            "comm.all_gather(x[:3], out=out)",
            "comm.barrier()",
            "all_gather(float64[3])",
            "barrier()",
        ),
        (
            "start(comm, 'gather', x[:3], out, 9, root=0, counts=(3, 3, 3)).wait()",
            "start(comm, 'gather', x[:4], out, 9, root=0, counts=(3, 2, 4)).wait()",
            "gather(float64[3], root=0, counts=[3, 3, 3])",
            "gather(float64[4], root=0, counts=[3, 2, 4])",
        ),
    ],
)
def test_members_that_disagree_all_say_so_and_no_output_is_touched(
    even: str, odd: str, first: str, second: str
) -> None:
    said = failing(f"""
comm.barrier()
x, out = np.ones(9), np.full(9, 5.0)
with pytest.raises(errors.MismatchError) as caught:
    {odd} if rank == 2 else {even}
assert (out == 5.0).all()
assert time.monotonic() - began < 5
with pytest.raises(errors.ClosedError, match="dead since") as again:
    comm.barrier()
assert str(caught.value) in str(again.value)
say(rank, str(caught.value).partition(": ")[2])
""")
    site = r" at \S*\.py:\d+ "
    sides = [
        (first, "here", second, 2),
        (first, "on rank 0", second, 2),
        (second, "here", first, 0),
    ]
    for line, (own, where, other, rank) in zip(said, sides, strict=True):
        calls = f"{re.escape(own)}{site}{where}, but {re.escape(other)}{site}on rank {rank}"
        assert re.search(f"call #1 differs: {calls}; ", line), said


def test_a_disagreement_among_calls_in_flight_is_that_of_the_first() -> None:
    said = failing("""
works = [
    comm.all_reduce(np.ones(10 + (i == 3 and rank == 1)), async_op=True) for i in range(6)
]
with pytest.raises(errors.MismatchError) as caught:
    works[5].wait()
assert "#3 differs: all_reduce(float64[1" in str(caught.value)
assert "all_reduce(float64[10], op='sum') at " in str(caught.value)
assert "all_reduce(float64[11], op='sum') at " in str(caught.value)
with pytest.raises(errors.ClosedError):
    works[3].wait()
say("fine")
""")
    assert said == ["fine"] * 3


def test_a_receive_of_something_else_fails_both_ends_and_touches_nothing() -> None:
    said = failing(
        """
out = np.full(5, 7, "f4")
if rank == 0:
    work = start(comm, "send", np.ones(5), None, 5, root=1, tag=3)
    work.wait()  # it is small, and has gone
    with pytest.raises(errors.MismatchError) as caught:
        comm.barrier()
else:
    with pytest.raises(errors.MismatchError) as caught:
        start(comm, "recv", None, out, 5, root=-1, tag=3).wait()
    assert (out == 7).all()
say(str(caught.value).partition(": ")[2])
""",
        size=2,
    )
    for line in said:
        assert re.fullmatch(
            r"a message differs: send\(float64\[5\], dest=1, tag=3\) at \S+:\d+ on rank 0, but "
            r"recv\(float32\[5\], source=ANY, tag=3\) at \S+:\d+ on rank 1; types must be .*",
            line,
        ), said


def test_a_timeout_names_the_missing_rank_and_the_call() -> None:
    said = failing(
        """
comm.all_reduce(np.ones(3))
if rank == 1:
    time.sleep(5)
with pytest.raises(errors.TimeoutError) as caught:
    comm.all_reduce(np.ones(10))
assert rank == 1 or 2 < time.monotonic() - began < 4.5
say(caught.value)
time.sleep(0 if rank == 1 else 4)  # with rank 0 would go who tells rank 1
""",
        timeout=2.5,
    )
    for line in said:
        assert "gave up all_reduce(float64[10], op='sum') #1 after 2.5 s" in line
        assert "rank 1 did not make the call" in line
        assert "raise the timeout" in line


def test_a_work_has_a_timeout_of_its_own_and_a_receive_names_its_peer() -> None:
    said = failing(
        """
if rank == 0:
    work = start(comm, "recv", None, np.zeros(3), 3, root=1, tag=0)
    with pytest.raises(errors.TimeoutError, match="after 0.5 s: no matching call of rank 1 "):
        work.wait(timeout=0.5)
    assert time.monotonic() - began < 2
else:
    time.sleep(1)
say("fine")
""",
        size=2,
    )
    assert said == ["fine"] * 2


def test_a_long_wait_is_reported_once() -> None:
    program = """
from allreduce.comm import mpi_vigil
mpi_vigil.WARN_SECONDS = 0.5
if rank == 1:
    time.sleep(2.5)
assert comm.all_reduce(1) == 2
"""
    result = job(FAILURES.format(timeout=20) + program, 2)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "has waited" in line]
    assert "[mpi] rank 0 has waited" in line
    assert "all_reduce(int64[1], op='sum') #0: rank 1 did not make the call" in line


def test_abort_and_leaving_are_told_to_those_who_wait() -> None:
    said = failing("""
comm.barrier()
if rank == 1:
    comm.abort("the disk is full")
with pytest.raises(errors.AllreduceError) as caught:
    comm.barrier()
say(rank, type(caught.value).__name__, caught.value)
""")
    assert "PeerLostError [mpi] rank 0: rank 1 aborted the communicator: the disk is" in said[0]
    assert "ClosedError [mpi] rank 1: the communicator is dead since:" in said[1]
    assert "PeerLostError [mpi] rank 2: rank 1 aborted the communicator: the disk is" in said[2]


@pytest.mark.parametrize(
    "missed", ["comm.barrier()", "start(comm, 'recv', None, x, 3, root=1, tag=0).wait()"]
)
def test_one_that_left_normally_is_reported_as_that(missed: str) -> None:
    said = failing(f"""
x = np.zeros(3)
comm.barrier()
if rank == 1:
    comm.close()
    say("left")
else:
    with pytest.raises(errors.PeerLostError, match="rank 1 left normally"):
        {missed}
    assert time.monotonic() - began < 5
    say("missed it")
""")
    assert said == ["left", "missed it", "missed it"]


def test_close_completes_what_was_started_and_disturbs_nobody() -> None:
    said = failing("""
out = np.zeros(300000)
comm.all_reduce(np.ones(300000), out=out, async_op=True)
comm.close()
assert (out == size).all()
with pytest.raises(errors.ClosedError):
    comm.barrier()
assert init().all_reduce(2) == 2 * size  # a new one of the same world
say("fine")
""")
    assert said == ["fine"] * 3


def test_an_interrupted_wait_kills_the_communicator() -> None:
    said = failing(
        """
import signal
def interrupt(*_): raise InterruptedError("now")
signal.signal(signal.SIGALRM, interrupt)
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(InterruptedError):
        comm.all_reduce(np.ones(3))
else:
    time.sleep(1.5)
    with pytest.raises(errors.PeerLostError, match="rank 0 aborted .* interrupted by Interr"):
        comm.all_reduce(np.ones(3))
say("fine")
time.sleep(2 - rank)
""",
        size=2,
    )
    assert said == ["fine"] * 2


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


def test_threads_are_refused_where_mpi_allows_only_the_main_one() -> None:
    program = """
import threading
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
from allreduce.comm import init

comm = init(transport="mpi", timeout=20)
errors = []
def call():
    try:
        comm.barrier()
    except ValueError as error:
        errors.append(str(error))
thread = threading.Thread(target=call)
thread.start()
thread.join()
assert MPI.Query_thread() > MPI.THREAD_FUNNELED or "main thread only" in errors[0]
comm.barrier()
"""
    result = job(program, 2)
    assert result.returncode == 0, result.stderr


def test_it_is_for_processes_that_mpi_has_started() -> None:
    assert opener("mpi") is open_mpi
    assert "mpi" in REGISTRY
    with pytest.raises(UsageError, match="comes from 'alone'; start the script with mpirun"):
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
