"""Failures over mpi: members that disagree, leave, abort or do not come are named on all."""

from __future__ import annotations

import json
import re

import pytest

from tests.comm.cases import mpi_failure_cases
from tests.comm.transports.mpi.jobs import FAILURES, failing, job

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
        "comm.gather(x[:3], out=out, counts=[3, 3, 3])",
        "comm.gather(x[:4], out=out, counts=[3, 2, 4])",
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
assert time.monotonic() - began < 25
assert (out == 5.0).all()
with pytest.raises(errors.ClosedError, match="dead since") as again:
    comm.barrier()
assert str(caught.value).partition(" (item")[0] in str(again.value)
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
        result = job("".join([FAILURES.format(timeout=50), "home = comm\n", *bodies]), 3)
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
            assert ("(item 0 is float64[" in line) == ("([" in first), line


FAIL = """
import json, os, traceback
from allreduce.comm import init
from allreduce.comm.transports.mpi import wait_monitor
from tests.comm.cases import mpi_failure_cases as cases

wait_monitor._GRACE_SECONDS = 0.5
home = init(transport="mpi", timeout=50)
for name in {names!r}:
    comm = home.split(0 if home.rank < 2 or name not in cases.PAIRS else None)
    if comm is not None:
        try:
            said = getattr(cases, name)(home, comm) or "fine"
        except BaseException:
            said = traceback.format_exc()
        os.write(1, (json.dumps([name, comm.rank, said]) + "\\n").encode())  # in one piece
    if name != cases.LAST:
        home.barrier()
"""
FINE = ("in_flight", "own_timeout", "left", "asked", "both_left", "interrupted", "completed")


class TestFailures:
    """All in one job, each in a group of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def said(cls) -> dict[str, list[str]]:
        """Return the ranks' reports of each case, in their order."""
        names = ("something_else", "aborted", "no_room", *FINE)
        result = job(FAIL.format(names=names), 3, timeout=100)
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        found: dict[str, list[str]] = {}
        for name, _, text in sorted(lines):
            found.setdefault(name, []).append(text)
        return found

    @pytest.mark.parametrize("case", FINE)
    def test_case(self, said: dict[str, list[str]], case: str) -> None:
        ranks = 2 if case in mpi_failure_cases.PAIRS else 3
        assert said.get(case) == ["fine"] * ranks

    def test_a_receive_of_something_else_fails_both_ends(self, said: dict[str, list[str]]) -> None:
        assert len(said["something_else"]) == 2
        for line in said["something_else"]:
            assert re.fullmatch(
                r"\[mpi\] \S+: rank \d: a message differs: send\(float64\[5\], dest=1, tag=3\) at "
                r"\S+:\d+ on rank 0, but recv\(float32\[5\], source=ANY, tag=3\) at \S+:\d+ on "
                r"rank 1; types must be .*",
                line,
            ), said

    def test_an_abort_is_told_to_those_who_wait(self, said: dict[str, list[str]]) -> None:
        told = r"PeerLostError \[mpi\] \S+: rank {}: rank 1 aborted the communicator: the disk is"
        own = r"ClosedError \[mpi\] \S+: rank 1: the communicator is dead since:"
        wanted = (told.format(0), own, told.format(2))
        for words, line in zip(wanted, said["aborted"], strict=True):
            assert re.match(words, line), said

    def test_a_rank_without_memory_for_a_conversion_tells_all(
        self, said: dict[str, list[str]]
    ) -> None:
        short = (
            r"all_reduce\(float16\[16777216\], op='sum'\): no memory for 64 MiB, in which float16 "
            r"is reduced as float32; free some on this rank's host, or run fewer ranks there"
        )
        told = rf"PeerLostError \[mpi\] \S+: rank {{}}: rank 1 aborted the communicator: {short}"
        own = rf"OutOfMemoryError \[mpi\] \S+: rank 1: {short}"
        wanted = (told.format(0), own, told.format(2))
        for words, line in zip(wanted, said["no_room"], strict=True):
            assert re.match(words, line), said


def test_a_timeout_names_the_missing_rank_and_the_call() -> None:
    said = failing(
        """
from tests.harness import shorten
store = world().store
comm.all_reduce(np.ones(3))
if rank == 1:
    store.get("gave up", 25)
elif rank == 0:
    store.get("posted", 25)
    shorten(comm, 0.95)  # less than after which rank 2 tells by itself that it waits
with pytest.raises(errors.TimeoutError) as caught:
    work = comm.all_reduce(np.ones(10), async_op=True)
    if rank == 2:
        store.set("posted", b"")
    work.wait(25 if rank == 2 else None)
if rank == 0:
    store.set("gave up", b"")
say(caught.value)
world().exchange("told", b'', 25)  # rank 0 must stay: rank 1 learns of the death from it
"""
    )
    for line in said:
        assert "gave up all_reduce(float64[10], op='sum') #1 after 0.95 s" in line
        assert "rank 1 made its last call, all_reduce(float64[3], op='sum') #0 (process " in line
        assert "raise the timeout" in line
        assert line.count("made its last call") == 1, "rank 2 waits in the call, too"


def test_who_keeps_the_store_may_be_stopped_for_a_while() -> None:
    program = """
import os, signal, subprocess
from allreduce.cluster.leader import client
from allreduce.comm.transports.mpi import wait_monitor
from tests.harness import until_stopped
comm.all_reduce(1)
client._ANSWER_MARGIN, wait_monitor.WARN_SECONDS = 0.3, 1.0
if rank == 0:
    subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    until_stopped(world().members[0].pid)
assert comm.all_reduce(1) == 2
"""
    result = job(FAILURES.format(timeout=20) + program, 2)
    assert result.returncode == 0, result
    (told,) = (line for line in result.stderr.splitlines() if "has waited" in line)
    assert "[mpi] rank 1 has waited 1" in told
    assert "rank 0 made its last call, all_reduce(int64[1], op='sum') #" in told
    assert "is stopped, by a signal" in told


def test_a_long_wait_is_reported_once() -> None:
    program = """
import threading
from allreduce.comm.transports.mpi import wait_monitor
wait_monitor._ANNOUNCE_SECONDS = 0.4
wait_monitor.WARN_SECONDS = 0.3 + rank * 9
for message in (False, True):
    if rank == 1 and message:
        comm.recv(np.zeros(3), source=0)
        assert transport(comm)._board._get("message/1") == ""  # that is over
    elif message:
        wait_monitor.WARN_SECONDS = 1.2
        threading.Timer(4, comm.send, (np.ones(3), 1)).start()
    elif rank == 1:
        time.sleep(2.5)
    assert comm.all_reduce(1) == 2
"""
    result = job(FAILURES.format(timeout=20) + program, 2)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "has waited" in line]
    call = "all_reduce(int64[1], op='sum')"
    assert len(lines) == 2, lines
    assert all("[mpi] rank 0 has waited" in line for line in lines)
    assert f" in {call} #0: rank 1 is not known to have made a call (process " in lines[0]
    did = f"made its last call, {call} #0, and waits in a recv for rank 0 (process "
    assert f" in {call} #1: rank 1 {did}" in lines[1]


def test_a_call_that_all_had_begun_completes_before_a_mismatch_is_raised() -> None:
    said = failing(
        """
from allreduce.comm.transports.mpi import converted
converted._PIECE_BYTES = 64
comm.barrier()
halves = np.ones(1 << 13, np.float16)  # 512 pieces
work = comm.all_reduce(halves, out=halves, async_op=True)
with pytest.raises(errors.MismatchError, match="barrier"):
    comm.barrier() if rank == 1 else comm.all_reduce(np.ones(4))
assert (work.wait() == 3).all()
work = None
say("complete")
"""
    )
    assert said == ["complete"] * 3


def test_a_call_that_all_had_begun_completes_though_another_rank_has_aborted() -> None:
    """Rank 0 hears of it at each look, while rank 2 does not drive its part of the call."""
    said = failing(
        """
from allreduce.comm.transports.mpi import transport as mpi_transport, wait_monitor
wait_monitor._POLL_SECONDS = 0.01
x = np.full(1 << 20, rank + 1.0)
comm.barrier()
work = comm.broadcast(x, root=1, async_op=True)  # whose root is done before the others
if rank == 1:
    work.wait()
    comm.abort("the disk is full")
elif rank == 2:
    time.sleep(0.4)
assert (work.wait() == 2).all()
with pytest.raises(errors.AllreduceError, match="the disk is full"):
    comm.barrier()
say("complete")
world().exchange("told", b'', 20)
"""
    )
    assert said == ["complete"] * 3
