"""Jobs whose ranks end, one before the others: who is named, and that nothing is left behind."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.processes import run, wait_gone
from tests.run.launches import JOIN, LAUNCH, Write, launch

WAITS = "world.exchange('never', b'', 60)"
ENDINGS = {
    "raise ValueError('boom')": 1,
    "sys.exit(7)": 7,
    "raise SystemExit(9)": 9,
    "os._exit(11)": 11,
    "os.kill(os.getpid(), signal.SIGKILL)": 128 + signal.SIGKILL,
    "os.kill(os.getpid(), signal.SIGSEGV)": 128 + signal.SIGSEGV,
}
WHILE_WAITING = ("raise ValueError('boom')", "os.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.parametrize(
    ("ending", "code", "busy"),
    [
        *((ending, code, "time.sleep(60)") for ending, code in ENDINGS.items()),
        *((ending, ENDINGS[ending], WAITS) for ending in WHILE_WAITING),
        *(
            pytest.param(ending, code, WAITS, marks=pytest.mark.torture)
            for ending, code in ENDINGS.items()
            if ending not in WHILE_WAITING
        ),
    ],
)
def test_the_first_failing_ranks_code_is_returned(
    script: Write, ending: str, code: int, busy: str
) -> None:
    path = script(f"{JOIN}print(os.getpid())\nif world.rank == 1: {ending}\n{busy}")
    result = launch(3, path, deadline=25)
    assert result.code == code, result.err
    assert "[allreduce.run] rank 1 (process" in result.err
    if "boom" in ending:
        assert "[1] ValueError: boom" in result.err
    pids = [int(line.split()[1]) for line in result.out.splitlines()]
    assert wait_gone(pids) == []


def test_the_output_ends_with_the_cause_and_the_users_line(script: Write) -> None:
    path = script(
        """
        import numpy as np
        import allreduce as ar
        comm = ar.init()
        def compute(x):
            if comm.rank == 1:
                raise ValueError("no such label")
            return comm.all_reduce(x)
        compute(np.ones(3))
        """
    )
    result = launch(2, path, deadline=25)
    lines = result.err.splitlines()
    cause = f"ValueError: no such label ({path}:7, in compute)"
    raised = f'{path}:7, in compute: raise ValueError("no such label")'
    assert f"[1] [allreduce] rank 1 failed at {raised}" in lines
    lost = next(line for line in lines if line.startswith("[0] allreduce.errors.PeerLostError"))
    assert lost.endswith(f"ended with {cause}"), lost
    called = f"{path}:8, in compute: return comm.all_reduce(x)"
    assert f"[0] [allreduce] rank 0 stopped at {called}" in lines
    assert lines[-1].startswith("[allreduce.run] ")
    assert "rank 1" in lines[-1]
    assert lines[-1].endswith(f"failed with exit code 1: {cause}")


@pytest.mark.parametrize("dev_mode", [False, True])
def test_the_traceback_of_a_lost_rank_ends_at_the_users_line(script: Write, dev_mode: bool) -> None:
    path = script(
        """
        import os, signal
        import numpy as np
        import allreduce as ar
        comm = ar.init()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(np.ones(3))
        """
    )
    environment = {"PYTHONDEVMODE": "1"} if dev_mode else {}
    result = run([*LAUNCH, "-n", "2", str(path)], environment, deadline=30)
    lines = result.err.splitlines()
    began = lines.index("[0] Traceback (most recent call last):")
    ended = next(i for i, line in enumerate(lines) if "PeerLostError: [shared] rank 0" in line)
    frames = [line for line in lines[began:ended] if line.startswith('[0]   File "')]
    assert frames[0] == f'[0]   File "{path}", line 8, in <module>'
    assert (len(frames) > 1) == dev_mode, result.err


def test_a_rank_that_repeats_anothers_error_is_not_blamed(script: Write) -> None:
    path = script(
        """
        import time
        import allreduce as ar
        from allreduce.errors import everywhere
        comm = ar.init()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.3)
            raise ValueError("no such label")
        raise everywhere(ar.MismatchError("the step raised on rank 1"))
        """
    )
    result = launch(2, path, deadline=25)
    last = result.err.splitlines()[-1]
    assert re.search(rf"rank 1 .*failed .*: ValueError: no such label \({path}:9\)$", last), last


def test_the_rank_that_failed_is_named_and_not_one_that_ended_before_it_for_want_of_it(
    script: Write,
) -> None:
    path = script(
        """
        import os, sys, time
        import numpy as np
        import allreduce as ar
        comm = ar.init()
        first, *_ = comm.all_gather(np.array([os.getpid()]))
        if comm.rank == 1:
            comm.abort("no such file")
            while os.path.exists(f"/proc/{first}"):
                time.sleep(0.02)
            sys.exit(7)
        try:
            comm.barrier()
        except ar.PeerLostError as error:
            if comm.rank == 0:
                sys.exit(5)
            raise RuntimeError("the step failed") from error
        """
    )
    result = launch(3, path, deadline=25)
    assert result.code == 7, result.err
    told = [line for line in result.err.splitlines() if line.startswith("[allreduce.run]")]
    assert len(told) == 1, told
    assert re.fullmatch(
        r"\[allreduce.run\] rank 1 \(process \d+\) failed with exit code 7", told[0]
    )


def test_the_others_have_time_to_report(script: Write, tmp_path: Path) -> None:
    path = script(
        """
        import os, signal, sys, time
        def report(*_):
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, report)
        if os.environ["ALLREDUCE_RANK"] == "1":
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            sys.exit(4)
        open(sys.argv[1], "w").close()
        time.sleep(60)
        """
    )
    result = launch(2, path, str(tmp_path / "ready"), deadline=25)
    assert (result.code, result.out) == (4, "[0] saved\n")


def test_one_that_has_begun_to_report_has_more_time(script: Write) -> None:
    path = script(
        """
        import os, signal, sys, time

        def told(kind, error, trace):
            time.sleep(1.5)  # as on a machine that is busy
            os.write(2, b"told\\n")

        sys.excepthook = told
        import allreduce as ar
        comm = ar.init()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
        """
    )
    result = launch(2, path, deadline=25)
    assert result.code == 128 + signal.SIGKILL, result
    assert "[0] told" in result.err, result


def test_a_rank_that_ignores_signals_is_killed(script: Write, tmp_path: Path) -> None:
    path = script(
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.mkdir(f"{sys.argv[1]}/ready-{os.environ['ALLREDUCE_RANK']}")
        if os.environ["ALLREDUCE_RANK"] == "1":
            while sum(name.startswith("ready") for name in os.listdir(sys.argv[1])) < 3:
                time.sleep(0.01)
            sys.exit(4)
        time.sleep(60)
        """
    )
    command = [*LAUNCH, "--grace", "2", "-n", "3", str(path), str(tmp_path)]
    assert run(command, deadline=25).code == 4


def test_what_a_rank_started_ends_with_it(script: Write) -> None:
    path = script(
        """
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        """
    )
    result = launch(2, path, deadline=25)
    pids = [int(line.split()[1]) for line in result.out.splitlines()]
    assert len(pids) == 2
    assert wait_gone(pids) == []


def test_a_closed_output_ends_the_job(script: Write) -> None:
    path = script(
        """
        import itertools, os, time
        for number in itertools.count():
            print(os.getpid(), flush=True)
            time.sleep(0.01)
        """
    )
    command = [*LAUNCH, "-n", "2", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = {int(process.stdout.readline().split()[1]) for _ in range(50)}
        process.stdout.close()
        assert process.wait(25) == 128 + signal.SIGPIPE
        assert wait_gone(list(pids)) == []


def test_a_rank_that_ends_before_it_joins_is_told_to_those_that_wait(
    script: Write, tmp_path: Path
) -> None:
    path = script(
        """
        import os, sys, time
        from allreduce import PeerLostError, cluster
        if os.environ["ALLREDUCE_RANK"] == "1":
            sys.exit(0)
        try:
            cluster.join()
        except PeerLostError:  # its end ends the other one, which may not have joined yet
            os.mkdir(f"{sys.argv[1]}/{os.getpid()}")
            while len(os.listdir(sys.argv[1])) < 2:
                time.sleep(0.02)
            raise
        """
    )
    folder = tmp_path / "told"
    folder.mkdir()
    result = launch(3, path, str(folder), deadline=40)
    assert result.code == 1
    told = r"PeerLostError: .* rank 1 \(process \d+ on .*\) is gone: it ended with exit code 0 "
    *others, last = result.err.splitlines()  # the last line repeats the error of one of them
    assert len(re.findall(told, "\n".join(others))) == 2, result.err
    assert re.search(told, last), result.err


def test_ranks_that_never_join_end_as_any_program(script: Write) -> None:
    assert launch(2, script("print('done')")).code == 0
