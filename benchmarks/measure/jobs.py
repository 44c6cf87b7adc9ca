"""Processes with a deadline: all ranks of a job end together, whatever ends the first."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_POLL_SECONDS = 0.05
_TAIL = 2000  # characters of a failed process's output


class JobError(RuntimeError):
    """A job failed or did not end; the message has the end of its output."""


def run(
    commands: Sequence[Sequence[str]], *, environ: Mapping[str, str], cwd: Path, deadline: float
) -> str:
    """Run processes until all have ended.

    Args:
        commands: One per process.
        environ: Environment variables to change.
        cwd: Where they run.
        deadline: Seconds after which they are killed.

    Returns:
        Their outputs.

    Raises:
        JobError: One ended with a failure, upon which the others are killed, or time ran out.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_kill, process)
            processes.append(process)
        reason = _outcome(processes, deadline)
        if reason:
            for process in processes:
                _kill(process)
        output.seek(0)
        said = output.read()
        if reason:
            tail = said[-_TAIL:].strip()
            raise JobError(f"{' '.join(commands[0])}\n{reason}; it said:\n{tail}")
        return said


def free_ports(count: int) -> list[int]:
    """Return ports on the loopback interface that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _outcome(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait for all processes; return a description of failures, or ""."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return f"ended with code {failed[0]}"
        if None not in codes:
            return ""
        time.sleep(_POLL_SECONDS)
    return f"still ran after {deadline:g} s"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its session; a launcher's ranks may live in groups of their own."""
    if process.poll() is None:
        process.terminate()  # lets a launcher end its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
