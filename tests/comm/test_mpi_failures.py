"""The mpi transport's failures: who disagrees, leaves, aborts or does not come is named on all."""

from __future__ import annotations

import re

import pytest

from tests.comm.mpi_jobs import FAILURES, failing, job

DISAGREEING = (  # rank 2 makes the second call of each
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
)

DISAGREE = """
comm = home.split(0)
x, out = np.ones(9), np.full(9, 5.0)
comm.barrier()
began = time.monotonic()
with pytest.raises(errors.MismatchError) as caught:
    {odd} if rank == 2 else {even}
assert time.monotonic() - began < 1
assert (out == 5.0).all()
with pytest.raises(errors.ClosedError, match="dead since") as again:
    comm.barrier()
assert str(caught.value) in str(again.value)
say({number}, rank, str(caught.value).partition(": ")[2])
home.barrier()
"""


class TestDisagreement:
    """All in one job, each in a group of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def said(cls) -> list[str]:
        bodies = [
            DISAGREE.format(number=number, even=even, odd=odd)
            for number, (even, odd, *_) in enumerate(DISAGREEING)
        ]
        result = job("".join([FAILURES.format(timeout=20), "home = comm\n", *bodies]), 3)
        assert result.returncode == 0, result.stderr
        return sorted(result.stdout.splitlines())

    @pytest.mark.parametrize("number", range(len(DISAGREEING)))
    def test_all_say_so_and_no_output_is_touched(self, said: list[str], number: int) -> None:
        *_, first, second = DISAGREEING[number]
        site = r" at \S*\.py:\d+ "
        sides = [
            (first, "here", second, 2),
            (first, "on rank 0", second, 2),
            (second, "here", first, 0),
        ]
        for me, (own, where, other, rank) in enumerate(sides):
            (line,) = [one for one in said if one.startswith(f"{number} {me} ")]
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
    time.sleep(3.5)
with pytest.raises(errors.TimeoutError) as caught:
    comm.all_reduce(np.ones(10))
assert rank == 1 or 1 < time.monotonic() - began < 3.2
say(caught.value)
time.sleep(0 if rank == 1 else 2.5)  # with rank 0 would go who tells rank 1
""",
        timeout=1.5,
    )
    for line in said:
        assert "gave up all_reduce(float64[10], op='sum') #1 after 1.5 s" in line
        assert "rank 1 made its last call, all_reduce(float64[3], op='sum') #0 (process " in line
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
import threading
from allreduce.comm.mpi import vigil as mpi_vigil
mpi_vigil.WARN_SECONDS = 0.5 + rank * 9
for message in (False, True):
    if rank == 1 and message:
        comm.recv(np.zeros(3), source=0)
        assert transport(comm)._news._get("message/1") == ""  # that is over
    elif message:
        mpi_vigil.WARN_SECONDS = 1.8
        threading.Timer(2.3, comm.send, (np.ones(3), 1)).start()
    elif rank == 1:
        time.sleep(1.3)
    assert comm.all_reduce(1) == 2
"""
    result = job(FAILURES.format(timeout=20) + program, 2)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "has waited" in line]
    call = "all_reduce(int64[1], op='sum')"
    assert len(lines) == 2, lines
    assert all("[mpi] rank 0 has waited" in line for line in lines)
    assert f" in {call} #0: rank 1 has made no call yet (process " in lines[0]
    did = f"made its last call, {call} #0, and waits in a recv for rank 0 (process "
    assert f" in {call} #1: rank 1 {did}" in lines[1]


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


def test_one_that_left_normally_is_reported_as_that() -> None:
    said = failing("""
home, x = comm, np.zeros(3)
missed = (
    lambda: comm.barrier(),
    lambda: start(comm, "recv", None, x, 3, root=1, tag=0).wait(),
)
for call in missed:
    comm = home.split(0)
    comm.barrier()
    began = time.monotonic()
    if rank == 1:
        comm.close()
    else:
        with pytest.raises(errors.PeerLostError, match="rank 1 left normally"):
            call()
        assert time.monotonic() - began < 5
say("left" if rank == 1 else "missed it")
""")
    assert said == ["left", "missed it", "missed it"]


def test_one_that_left_is_found_by_those_who_only_ask_whether_a_call_is_done() -> None:
    said = failing("""
comm.barrier()
if rank == 1:
    comm.close()
    say("left")
else:
    work = comm.all_reduce(np.zeros(3), async_op=True)
    with pytest.raises(errors.PeerLostError, match="rank 1 left normally"):
        while time.monotonic() - began < 5:
            work.done()
            time.sleep(0.01)
    say("missed it")
""")
    assert said == ["left", "missed it", "missed it"]


def test_those_that_left_do_not_hide_each_other_from_a_receive() -> None:
    said = failing("""
home = comm
for source in (1, -1):
    comm = home.split(0)
    comm.barrier()
    began = time.monotonic()
    if rank:
        time.sleep(rank / 5)
        comm.close()
    else:
        with pytest.raises(errors.PeerLostError, match="rank . left normally"):
            comm.recv(np.zeros(3), source)
        assert time.monotonic() - began < 5
say("left" if rank else "missed them")
""")
    assert said == ["left", "left", "missed them"]


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
