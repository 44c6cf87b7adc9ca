"""Run scripts in real processes with a hard deadline."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import free_port

PREFIXES = (
    "ALLREDUCE_",
    "SLURM_",
    "PMI",
    "MPI_LOCAL",
    "OMPI_",
    "HYDI_",
    "PYTHONUNBUFFERED",
    "TORCHELASTIC_",
)


@dataclass(frozen=True)
class Result:
    """How one process ended."""

    code: int | None  # None where it lived too long and was killed
    out: str
    err: str
    seconds: float


class Running:
    """A process in its own session, which is killed with its whole group at the end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            env={**clean_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # a read of a line leaves the rest of the output to `end`
            start_new_session=True,
        )
        self.pid = self._process.pid

    def line(self) -> str:
        """Read one line of its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().rstrip("\n")

    def error_line(self, words: str = "") -> str:
        """Read its standard error up to a line with some words."""
        assert self._process.stderr is not None
        while line := self._process.stderr.readline().decode():
            if words in line:
                return line.rstrip("\n")
        raise AssertionError(f"no line with {words!r} came: {self.finish(25)}")

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it, or to its whole group as a terminal does."""
        (os.killpg if group else os.kill)(self.pid, number)

    def finish(self, deadline: float) -> Result:
        """Wait for its end; fails the test when it lives longer than `deadline` seconds."""
        result = self.end(deadline)
        assert result.code is not None, f"still running after {deadline} s: {result}"
        return result

    def end(self, deadline: float) -> Result:
        """Wait for its end, or bring it about when it lives longer than `deadline` seconds."""
        try:
            out, err = self._process.communicate(timeout=deadline)
            code: int | None = self._process.returncode
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self._process.communicate()
            code = None
        return Result(code, out.decode(), err.decode(), time.monotonic() - self._began)

    def bury(self) -> None:
        """Wait for a killed process and close its pipes."""
        with self._process:
            pass

    def kill(self) -> None:
        """Kill its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def clean_environment() -> dict[str, str]:
    """Copy the environment without any word about a job."""
    return {name: text for name, text in os.environ.items() if not name.startswith(PREFIXES)}


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start a process for the block; nothing of it survives the block."""
    process = Running(command, environment or {})
    try:
        yield process
    finally:
        process.kill()
        process.bury()


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, deadline: float = 30
) -> Result:
    """Run a command to its end."""
    with running(command, environment) as process:
        return process.finish(deadline)


def run_together(
    script: Path, environments: Sequence[Mapping[str, str]], *, deadline: float = 30
) -> list[Result]:
    """Run one process of `script` per environment, all at once; a failure shows all outputs."""
    until = time.monotonic() + deadline
    with contextlib.ExitStack() as stack:
        command = [sys.executable, str(script)]
        started = [stack.enter_context(running(command, env)) for env in environments]
        results = [process.end(max(0.1, until - time.monotonic())) for process in started]
        assert all(each.code is not None for each in results), f"within {deadline} s: {results}"
        return results


def mpirun(size: int, script: Path, *arguments: str) -> list[str]:
    """Build the command that starts `script` under the mpich wheel's mpirun, or skip the test."""
    beside = Path(sys.executable).parent / "mpirun"
    if not beside.exists() or shutil.which(str(beside.parent / "mpiexec.hydra")) is None:
        pytest.skip("needs the mpich wheel: pip install allreduce[mpich]")
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install allreduce[mpich]")
    return [str(beside), "-n", str(size), sys.executable, str(script), *arguments]


def free_address() -> str:
    """Find an address without a listener."""
    return f"127.0.0.1:{free_port()}"


def alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids: Sequence[int], seconds: float = 25) -> list[int]:
    """Wait for processes to end; return the ones that did not."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def wait_until(holds: Callable[[], object], seconds: float = 25) -> None:
    """Wait until a condition holds; fails the test if it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
