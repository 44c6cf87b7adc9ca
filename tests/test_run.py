"""The launcher, with real ranks: output, exit codes, signals, and nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import Result, alive, run, running, wait_gone

Write = Callable[[str], Path]
LAUNCH = [sys.executable, "-m", "allreduce.run"]
JOIN = "import os, sys, time, signal\nfrom allreduce import cluster\nworld = cluster.join()\n"


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Write a script."""

    def write(lines: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(lines))
        return path

    return write


def launch(size: int, path: Path, *arguments: str, deadline: float = 30) -> Result:
    return run([*LAUNCH, "-n", str(size), str(path), *arguments], deadline=deadline)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_join_and_each_line_has_its_rank(script: Write, size: int) -> None:
    path = script(JOIN + "print(world.size, sys.argv[1:], 'ALLREDUCE_JOINED' in os.environ)")
    result = launch(size, path, "a", "--b", "-n")
    assert result.code == 0, result.err
    expected = [f"[{rank}] {size} ['a', '--b', '-n'] {size > 1}" for rank in range(size)]
    assert sorted(result.out.splitlines()) == expected
    assert result.err.count("ranks through leader" if size > 1 else "rank through leader") == 1


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_job.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run([*LAUNCH, "-n", "2", "-m", "some_job", "--x", "-m"])
    lines = sorted(result.out.splitlines())
    assert lines == ["[0] __main__ ['--x', '-m']", "[1] __main__ ['--x', '-m']"], result.err


def test_streams_stay_apart_and_lines_whole(script: Write) -> None:
    path = script(
        """
        import os, sys, time
        for number in range(200):
            for part in (b"line ", b"%d" % number, b"\\n"):
                os.write(1, part)
                os.write(2, part)
        os.write(1, b"no newline at the end")
        """
    )
    result = launch(3, path)
    for rank in range(3):
        mine = [line for line in result.out.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] line {n}" for n in range(200)] + [
            f"[{rank}] no newline at the end"
        ]
    assert sorted(result.err.splitlines()) == sorted(
        f"[{rank}] line {n}" for rank in range(3) for n in range(200)
    )


def test_colours_are_kept_out(script: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = launch(1, script("from rich import print; print('[red]plain[/red]')"))
    assert result.out == "[0] plain\n"


def test_nothing_arrives_on_standard_input(script: Write) -> None:
    assert launch(2, script("print(repr(input()))")).code == 1


WAITS = "world.store.barrier('never', 60)"
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
    result = launch(3, path, deadline=15)
    assert result.code == code, result.err
    assert "[allreduce.run] rank 1 (process" in result.err
    if "boom" in ending:
        assert "[1] ValueError: boom" in result.err
    pids = [int(line.split()[1]) for line in result.out.splitlines()]
    assert wait_gone(pids, 1) == []
    assert result.seconds < 8  # 5 s from the failure, and the start


def test_the_rank_that_failed_is_named_and_not_one_that_ended_before_it_for_want_of_it(
    script: Write,
) -> None:
    path = script(
        """
        import sys, time
        import allreduce as ar
        comm = ar.init()
        comm.barrier()
        if comm.rank == 1:
            comm.abort("no such file")
            time.sleep(1)
            sys.exit(7)
        try:
            comm.barrier()
        except ar.PeerLostError as error:
            if comm.rank == 0:
                sys.exit(5)
            raise RuntimeError("the step failed") from error
        """
    )
    result = launch(3, path, deadline=15)
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
    result = launch(2, path, str(tmp_path / "ready"), deadline=15)
    assert (result.code, result.out) == (4, "[0] saved\n")


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
    assert launch(3, path, str(tmp_path), deadline=10).code == 4


@pytest.mark.parametrize("joined", [True, False])
def test_ctrl_c_ends_the_job_with_one_line(script: Write, joined: bool) -> None:
    head = JOIN if joined else "import os, time\n"
    path = script(f"{head}os.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    with running([*LAUNCH, "-n", "3", str(path)]) as process:
        pids = [int(process.line().split()[1]) for _ in range(3)]
        process.signal(signal.SIGINT, group=True)
        result = process.finish(3)
        assert wait_gone(pids, 0) == []
    assert result.code == 130
    lines = [line for line in result.err.splitlines() if "ranks through" not in line]
    assert lines == ["[allreduce.run] interrupted"]


def test_what_a_rank_prints_on_ctrl_c_is_shown(script: Write) -> None:
    path = script(
        """
        import sys, time
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("saved", file=sys.stderr)
        """
    )
    with running([*LAUNCH, "-n", "1", str(path)]) as process:
        assert process.line() == "[0] ready"
        process.signal(signal.SIGINT)
        result = process.finish(3)
    assert result.err.splitlines() == ["[allreduce.run] interrupted", "[0] saved"]


def test_tracebacks_of_ctrl_c_are_left_out_whole(script: Write) -> None:
    path = script(
        """
        import sys, time
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:  # of a source line that is empty Python says so
            print("Traceback (most recent call last):", file=sys.stderr)
            print('  File "typing.py", line 412, in f\\n\\nKeyboardInterrupt', file=sys.stderr)
        """
    )
    with running([*LAUNCH, "-n", "1", str(path)]) as process:
        assert process.line() == "[0] ready"
        process.signal(signal.SIGINT)
        assert process.finish(3).err.splitlines() == ["[allreduce.run] interrupted"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_is_forwarded_and_told(script: Write, number: signal.Signals) -> None:
    path = script("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        pids = [int(process.line().split()[1]) for _ in range(2)]
        process.signal(number)
        result = process.finish(5)
        assert wait_gone(pids, 0) == []
    assert result.code == 128 + number
    assert result.err == f"[allreduce.run] got {number.name}; ending 2 ranks\n"


def test_a_closed_terminal_ends_the_job(script: Write) -> None:
    path = script("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    terminal, ours = os.openpty()
    command = [*LAUNCH, "-n", "2", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=ours) as process:
        os.close(ours)
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        assert process.wait(5) == 128 + signal.SIGHUP
        assert wait_gone(pids, 0) == []


def test_ranks_die_with_a_killed_launcher(script: Write) -> None:
    path = script(f"{JOIN}os.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    with running([*LAUNCH, "-n", "3", str(path)]) as process:
        pids = [int(process.line().split()[1]) for _ in range(3)]
        assert all(alive(pid) for pid in pids)
        process.signal(signal.SIGKILL)
        assert wait_gone(pids, 2) == []


def test_what_a_rank_started_ends_with_it(script: Write) -> None:
    path = script(
        """
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        """
    )
    result = launch(2, path, deadline=15)
    pids = [int(line.split()[1]) for line in result.out.splitlines()]
    assert len(pids) == 2
    assert wait_gone(pids, 1) == []


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
        assert process.wait(10) == 128 + signal.SIGPIPE
        assert wait_gone(list(pids), 1) == []


def test_a_job_within_a_job(script: Write, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(JOIN + "print('inner', world.rank, world.size)")
    path = script(
        f"""
        import subprocess, sys
        from allreduce import cluster
        world = cluster.join()
        if world.rank == 0:
            command = [sys.executable, "-m", "allreduce.run", "-n", "3", {str(inner)!r}]
            sys.exit(subprocess.run(command).returncode)
        """
    )
    result = launch(2, path)
    assert result.code == 0, result.err
    expected = [f"[0] [{rank}] inner {rank} 3" for rank in range(3)]
    assert sorted(result.out.splitlines()) == expected


def test_a_missing_script_is_told_before_anything_starts() -> None:
    result = run([*LAUNCH, "-n", "2", "absent.py"])
    assert result.code == 2
    assert "absent.py" in result.err


def test_an_interpreter_before_the_script_is_to_be_left_out() -> None:
    result = run([*LAUNCH, "-n", "2", "python3", "absent.py"])
    assert result.code == 2
    assert "leave it out" in result.err


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_impossible_sizes(size: str, script: Write) -> None:
    assert run([*LAUNCH, "-n", size, str(script(""))]).code == 2


def test_an_invalid_setting_is_one_line(script: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TIMEOUT", "soon")
    result = run([*LAUNCH, "-n", "2", str(script(""))], {"ALLREDUCE_TIMEOUT": "soon"})
    assert result.code == 1
    assert "ALLREDUCE_TIMEOUT='soon' is not valid" in result.err
    assert "Traceback" not in result.err


def test_an_unknown_transport_is_refused_once_and_before_ranks_start(script: Write) -> None:
    path = script("print('started')")
    result = run([*LAUNCH, "-n", "2", str(path)], {"ALLREDUCE_TRANSPORT": "sharde"})
    assert (result.code, result.out) == (1, "")
    told = r"\[allreduce\.run\] ALLREDUCE_TRANSPORT: unknown transport 'sharde': .* 'shared'\?\n"
    assert re.fullmatch(told, result.err), result.err


def test_many_ranks_start_and_meet(script: Write) -> None:
    result = launch(8, script(JOIN + "world.store.barrier('all', 20)"))
    assert result.code == 0, result.err


@pytest.mark.parametrize(("ranks", "files"), [(60, 128), (3, 24), (3, 20)])
def test_more_ranks_than_files_may_be_open_is_one_line(
    script: Write, ranks: int, files: int
) -> None:
    command = " ".join([*LAUNCH, "-n", str(ranks), str(script(""))])
    result = run(["bash", "-c", f"ulimit -n {files}; exec {command}"])
    assert result.code == 1
    (line,) = result.err.splitlines()
    assert line.startswith(f"[allreduce.run] cannot start {ranks} ranks: it needs ")
    assert f"are left of the {files} that ulimit -n allows" in line


def test_a_rank_that_ends_before_it_joins_is_told_to_those_that_wait(script: Write) -> None:
    path = script(f"import os, sys\nif os.environ['ALLREDUCE_RANK'] == '1': sys.exit(0)\n{JOIN}")
    result = launch(3, path, deadline=20)
    assert result.code == 1
    told = r"PeerLostError: .* rank 1 \(process \d+ on .*\) is gone: it ended with exit code 0 "
    assert len(re.findall(told, result.err)) == 2, result.err


def test_ranks_that_never_join_end_as_any_program(script: Write) -> None:
    assert launch(2, script("print('done')")).code == 0


FLOOD = """
    import os
    os.write({told}, b"%d\\n" % os.getpid())
    while True:
        os.write({flooded}, b"x" * 1000 + b"\\n")
    """


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_job_whose_output_nobody_reads(
    script: Write, number: signal.Signals
) -> None:
    command = [*LAUNCH, "-n", "2", str(script(FLOOD.format(told=2, flooded=1)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            pids = [int(process.stderr.readline().split()[1]) for _ in range(2)]
            time.sleep(0.5)  # the pipe is full, and what is kept for it
            process.send_signal(number)
            assert process.wait(3) == 128 + number
            assert wait_gone(pids, 0) == []
        finally:
            process.kill()


def test_a_slow_reader_gets_everything(script: Write) -> None:
    path = script("import os\nfor n in range(30000): os.write(1, b'%099d\\n' % n)")
    command = [*LAUNCH, "-n", "1", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        time.sleep(0.5)
        lines = process.stdout.read().splitlines()
        assert process.wait(10) == 0
    assert [int(line.split()[1]) for line in lines] == list(range(30000))


def test_user_signals_reach_the_ranks_and_end_nothing(script: Write) -> None:
    path = script(
        """
        import os, signal
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
        os.write(1, b"ready\\n")
        for _ in range(2):
            number = signal.sigwait((signal.SIGUSR1, signal.SIGUSR2))
            os.write(1, b"%d\\n" % number)
        """
    )
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        assert [process.line()[4:] for _ in range(2)] == ["ready", "ready"]
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            process.signal(number)
            assert {process.line() for _ in range(2)} == {f"[0] {number:d}", f"[1] {number:d}"}
        assert process.finish(5).code == 0


HASTY = (  # the launcher, which looks more often, and waits less
    "from allreduce.cluster import job\njob._LOOK_SECONDS = 0.05\njob._INTERRUPT_SECONDS = 0.1\n"
    "from allreduce.run import app\napp()"
)
LAST = (  # rank 1 stays when rank 0 has ended
    "import os, sys, time\nif os.environ['ALLREDUCE_RANK'] == '0': sys.exit()\n"
    "os.write(2, b'%d\\n' % os.getpid())\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
)


@contextlib.contextmanager
def last_rank(path: Path, gate: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Launch `LAST`, which stays until the gate is there; gives the launcher, and its pid."""
    command = [sys.executable, "-c", HASTY, "-np", "2", str(path), str(gate)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process, int(process.stderr.readline().split()[1])
        finally:
            process.kill()


def test_a_stopped_rank_that_keeps_the_job_is_named_once(script: Write, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with last_rank(script(LAST), gate) as (process, rank):
        os.kill(rank, signal.SIGSTOP)
        assert process.stderr is not None
        state = f"process {rank} is stopped, by a signal: kill -CONT lets it go on"
        line = process.stderr.readline()
        assert line == f"[allreduce.run] waiting for rank 1 ({state})\n"
        gate.touch()
        os.kill(rank, signal.SIGCONT)
        assert process.wait(5) == 0
        assert not process.stderr.read()


def test_ctrl_c_ends_a_job_whose_last_rank_is_in_a_debugger(script: Write, tmp_path: Path) -> None:
    with last_rank(script(LAST), tmp_path / "gate") as (process, rank):
        seize(rank)
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            state = f"process {rank} is stopped, by a debugger"
            assert line == f"[allreduce.run] waiting for rank 1 ({state})\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(5) == 130
            interrupted, held = process.stderr.read().splitlines()
            assert interrupted == "[allreduce.run] interrupted"
            assert f"rank 1 (process {rank}) is dead, but process {os.getpid()}" in held
        finally:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)  # as debuggers do


def seize(pid: int) -> None:
    """Stop a process as a debugger does, or skip the test where nobody may."""
    libc, seize, interrupt = ctypes.CDLL(None, use_errno=True), 0x4206, 0x4207  # ptrace(2)
    for request in (seize, interrupt):
        if libc.ptrace(request, pid, None, None) != 0:
            pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")


def test_quit_ends_the_job(script: Write) -> None:
    path = script(FLOOD.format(told=1, flooded=2))
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        assert all(process.line() for _ in range(2))
        time.sleep(0.3)  # the pipe is full
        process.signal(signal.SIGQUIT)
        assert process.finish(5).code == 128 + signal.SIGQUIT


def test_a_stopped_launcher_stops_its_ranks_until_it_goes_on(script: Write) -> None:
    path = script("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    with running([*LAUNCH, "-n", "1", str(path)]) as process:
        rank = int(process.line().split()[1])
        process.signal(signal.SIGTSTP)
        assert wait_state((process.pid, rank), "T") == "TT"
        process.signal(signal.SIGCONT)
        assert wait_state((process.pid, rank), "S") == "SS"
        process.signal(signal.SIGTERM)
        assert process.finish(5).code == 128 + signal.SIGTERM


def wait_state(pids: tuple[int, ...], state: str) -> str:
    """Wait at most 3 s until all processes are in a state; returns the states."""
    for _ in range(150):
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
        states = "".join(stat.rpartition(")")[2].split()[0] for stat in stats)
        if set(states) == {state}:
            break
        time.sleep(0.02)
    return states
