"""Signals to the launcher: which end the job, and how, and which are its ranks' own affair."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.cluster.processes import alive, running, wait_gone
from tests.run.launches import JOIN, LAUNCH, Write, lines_of


@pytest.mark.parametrize("joined", [True, False])
def test_ctrl_c_ends_the_job_with_one_line(script: Write, joined: bool) -> None:
    head = JOIN if joined else "import os, time\n"
    path = script(f"{head}os.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    with running([*LAUNCH, "-n", "3", str(path)]) as process:
        pids = [int(process.line().split()[1]) for _ in range(3)]
        process.signal(signal.SIGINT, group=True)
        result = process.finish(25)
        assert wait_gone(pids, 0) == []
    assert result.code == 130
    lines = [line for line in lines_of(result.err) if "ranks through" not in line]
    assert lines == ["[allreduce.run] interrupted; ending ranks 0, 1, 2"]


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
        result = process.finish(25)
    ours = "[allreduce.run] interrupted; ending rank 0"
    assert lines_of(result.err) == [ours, "[0] saved"]


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
        result = process.finish(25)
    assert lines_of(result.err) == ["[allreduce.run] interrupted; ending rank 0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_is_forwarded_and_told(script: Write, number: signal.Signals) -> None:
    path = script("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        pids = [int(process.line().split()[1]) for _ in range(2)]
        process.signal(number)
        result = process.finish(25)
        assert wait_gone(pids, 0) == []
    assert result.code == 128 + number
    assert lines_of(result.err) == [f"[allreduce.run] got {number.name}; ending ranks 0, 1"]


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
        assert process.wait(25) == 128 + signal.SIGHUP
        assert wait_gone(pids, 0) == []


def test_ranks_die_with_a_killed_launcher(script: Write) -> None:
    path = script(f"{JOIN}os.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    with running([*LAUNCH, "-n", "3", str(path)]) as process:
        pids = [int(process.line().split()[1]) for _ in range(3)]
        assert all(alive(pid) for pid in pids)
        process.signal(signal.SIGKILL)
        assert wait_gone(pids) == []


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
            assert process.wait(25) == 128 + number
            assert wait_gone(pids, 0) == []
        finally:
            process.kill()


def test_quit_ends_the_job(script: Write) -> None:
    path = script(FLOOD.format(told=1, flooded=2))
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        assert all(process.line() for _ in range(2))
        time.sleep(0.3)  # the pipe is full
        process.signal(signal.SIGQUIT)
        assert process.finish(25).code == 128 + signal.SIGQUIT


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
        assert process.finish(25).code == 0
