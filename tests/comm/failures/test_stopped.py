"""A stopped or missing rank: a warning, then a timeout, which name it and its state."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator
from allreduce.comm.calls.members import MemberInfo
from tests.cluster.processes import mpirun
from tests.harness import run_ranks, run_threads


def _waits(folder: str, transport: str, stops: bool) -> None:
    """Wait in rank 0 for rank 1, which stops itself; let it go on after that."""
    import os
    import signal
    import time
    from pathlib import Path

    import numpy as np
    import pytest

    from allreduce import errors
    from allreduce.comm import init, world
    from allreduce.comm.transports import native
    from allreduce.comm.transports.mpi import wait_monitor
    from tests.harness import until_stopped

    comm = init(transport=transport, timeout=60)
    comm.all_reduce(np.ones(7))
    native.WARN_SECONDS = wait_monitor.WARN_SECONDS = 0.5
    place = Path(folder)
    if comm.rank == 1:
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        while not (place / "told").exists():
            time.sleep(0.01)
    elif stops:
        until_stopped(world().members[1].pid)
    began = time.monotonic()
    said = ""
    try:
        comm.all_reduce(np.ones(10), async_op=True).wait(timeout=1.2)
        comm.barrier()  # what it was stopped in may be complete here: all it needed had come
    except errors.TimeoutError as error:
        said = f"{time.monotonic() - began:.2f} {error}"
    with pytest.raises(errors.ClosedError, match="dead since") as dead:
        comm.barrier()
    assert said.partition(" ")[2] in str(dead.value)
    (place / f"{comm.rank}.said").write_text(f"{world().members[1].pid}\n{said}\n")
    if comm.rank == 0:
        (place / "told").touch()
        os.kill(world().members[1].pid, signal.SIGCONT)
    until = time.monotonic() + 25  # rank 0 tells rank 1, which may have been stopped for long
    while not (place / "1.said").exists() and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical", "mpi"])
def test_one_that_does_not_come_is_named_with_its_last_call_and_its_state(
    transport: str, stops: bool, tmp_path: Path
) -> None:
    if transport == "mpi":
        mpirun(2, Path())
    kind = "mpirun" if transport == "mpi" else "env"
    arguments = (str(tmp_path), transport, stops)
    results = run_ranks(_waits, 2, arguments=arguments, launcher=kind, timeout=60)
    assert not any(result.returncode for result in results), results
    pid, said = (tmp_path / "0.said").read_text().splitlines()
    state = "is stopped, by a signal: kill -CONT lets it go on" if stops else "is alive"
    missing = r"rank 1 made its last call, all_reduce(float64[7], op='sum') #0"
    (warning,) = [line for line in results[0].stderr.splitlines() if "has waited" in line]
    for text in (warning, said):
        assert f"[{transport}] rank 0" in text
        assert missing in text
        assert f"(process {pid} {state})" in text
    assert "call #1" in warning or "#1:" in warning
    assert "rank 0: gave up all_reduce(float64[10], op='sum') #1 after 1.2 s" in said
    assert ("resume what is stopped" in said) == stops
    assert ("raise the timeout" in said) != stops
    assert 1.2 <= float(said.split()[0]) < 25
    other = (tmp_path / "1.said").read_text().splitlines()[1]
    gave_up = "rank 0 gave up all_reduce(float64[10], op='sum') #1 after 1.2 s"
    assert f"[{transport}] rank 1: {gave_up}: " in other


def _pauses(*transports: str) -> None:
    """Stop both ranks, while one waits for the other, for nearly as long as that may last."""
    import subprocess
    import time
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from allreduce.comm import init, world
    from allreduce.comm.transports import native
    from tests.harness import shorten

    native.WARN_SECONDS = 6.5  # until then no wait has anything to say
    comm = init(transport=transports[0])
    comms: list[Any] = [comm, *(comm.split(0, transport=other) for other in transports[1:])]
    for each in comms:
        each.barrier()
        shorten(each, 7)
    if comm.rank == 1:
        pids = " ".join(str(one.pid) for one in world().members)
        pause = f"sleep 1.5; kill -STOP {pids}; sleep 6; kill -CONT {pids}"
        with subprocess.Popen(["sh", "-c", pause], start_new_session=True):
            for _ in range(30):  # in pieces: one sleep would be over with the pause
                time.sleep(0.1)
    x = np.ones(3)
    if len(comms) == 1:  # mpi lets one thread in
        comm.all_reduce(x)
    else:
        with ThreadPoolExecutor(len(comms)) as pool:
            list(pool.map(lambda each: each.all_reduce(x), comms))


@pytest.mark.parametrize("transports", [("shared", "tcp", "hierarchical"), ("mpi",)])
def test_a_job_that_was_stopped_as_a_whole_goes_on(transports: tuple[str, ...]) -> None:
    if "mpi" in transports:
        mpirun(2, Path())
    kind = "mpirun" if "mpi" in transports else "env"
    results = run_ranks(_pauses, 2, arguments=transports, launcher=kind)
    assert not any(result.returncode for result in results), results


def _waits_in_a_ring(folder: str) -> None:
    import os
    import signal
    import time
    from pathlib import Path

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init, world
    from tests.harness import shorten

    comm = init(transport="tcp")
    comm.barrier()
    shorten(comm, 2)
    world().exchange("nobody waits in the first for what rank 1 has yet to send", b"", 25)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        while True:
            comm.all_reduce(np.ones(1 << 20))
    except errors.AllreduceError as error:
        Path(folder, f"{comm.rank}.said").write_text(str(error))
    if comm.rank == 0:
        time.sleep(0.5)
        os.kill(world().members[1].pid, signal.SIGCONT)
    os._exit(0)


def test_one_that_stops_in_a_ring_is_blamed_by_all_and_not_who_waits_for_it(tmp_path: Path) -> None:
    results = run_ranks(_waits_in_a_ring, 4, arguments=(str(tmp_path),), timeout=60)
    assert not any(result.returncode for result in results), results
    for rank in (0, 2, 3):
        said = (tmp_path / f"{rank}.said").read_text()
        assert "rank 1 made its last call" in said
        assert "is stopped, by a signal" in said


def _waits_for_one_that_stops_in_a_call(folder: str) -> None:
    import os
    import signal
    import time
    from pathlib import Path

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init, world
    from tests.harness import shorten

    comm = init(transport="tcp")
    transport: Any = comm._dispatch.transport
    x = np.ones(1 << 23, "float16")  # each needs a share that is made of everybody's
    comm.barrier()
    shorten(comm, 1.5)
    before = transport._member.payload_bytes()
    work = comm.all_reduce(x, async_op=True)
    if comm.rank == 1:
        while transport._member.payload_bytes() == before:  # all have begun
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
    if comm.rank == 2:
        time.sleep(2)  # it computes, and its part of the call goes on meanwhile
    try:
        work.wait()
    except errors.TimeoutError as error:
        Path(folder, f"{comm.rank}.said").write_text(str(error))
    if comm.rank == 0:
        time.sleep(0.5)
        os.kill(world().members[1].pid, signal.SIGCONT)
    os._exit(0)


def test_who_waits_for_one_that_stops_in_a_call_is_not_named_beside_it(tmp_path: Path) -> None:
    results = run_ranks(_waits_for_one_that_stops_in_a_call, 4, arguments=(str(tmp_path),))
    assert not any(result.returncode for result in results), results
    for rank in (0, 2, 3):
        said = (tmp_path / f"{rank}.said").read_text()
        assert "s: rank 1 made its last call" in said
        assert said.count("made its last call") == 1, said
        assert "is stopped, by a signal" in said


@pytest.mark.parametrize("message", [False, True])
@pytest.mark.parametrize("transport", ["tcp", "hierarchical"])
def test_one_that_is_stopped_is_not_blamed_for_what_another_has_not_begun(
    transport: str, message: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    monkeypatch.setattr(MemberInfo, "stopped", property(lambda member: member.index == 1))
    posted, over = threading.Event(), threading.Event()

    def call(comm: Communicator) -> tuple[str, int] | None:
        if comm.rank == 1 and not message:
            comm.all_reduce(np.ones(3), async_op=True)
            posted.set()
        if comm.rank:
            over.wait(25)
            return None
        if message:
            work = comm.recv(np.zeros(3), source=2, async_op=True)
        else:
            posted.wait(25)
            work = comm.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(errors.TimeoutError) as caught:
            work.wait(0.3)
        over.set()
        assert "replica 2" in str(caught.value)
        assert "replica 1" not in str(caught.value)
        told: Any = comm._dispatch.transport
        found: tuple[str, int] | None = getattr(told, "_control", told).verdict()
        return found

    assert run_threads(call, 3)[0] == ("timeout", 2)
