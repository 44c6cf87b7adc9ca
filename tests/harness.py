"""Ranks for tests: as threads of this process, and as processes with a hard deadline."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from allreduce import openblas
from allreduce.cluster.store import LocalStore
from allreduce.cluster.world import Member, World
from allreduce.comm import Communicator, replica_communicators

T = TypeVar("T")
ROOT = Path(__file__).parent.parent

_FIRST_PORT, _END_PORT = 12000, 32000  # below those that the kernel hands out by itself
_PORTS = 100  # that a process which runs tests has for itself


@dataclass(frozen=True)
class Result:
    """How a process ended. A negative return code is the signal that ended it."""

    returncode: int
    stdout: str
    stderr: str


def world_of_one() -> World:
    """Return a world that only this process is in."""
    me = Member(0, socket.gethostname(), os.getpid())
    return World(1, 0, 1, (me,), "single", "a test's", os.urandom(8).hex(), b"", LocalStore())


def run_threads(
    fn: Callable[[Communicator], T], size: int, timeout: float = 60, *, comm_timeout: float = 20
) -> list[T]:
    """Call `fn(comm)` in `size` threads, each with its member of one communicator.

    Args:
        fn: What each member does.
        size: How many members.
        timeout: Seconds until the test fails because threads still run.
        comm_timeout: The communicator's own timeout.

    Returns:
        What the calls returned, in member order. The first member's exception is raised.
    """
    outcomes = settle_threads(fn, size, timeout, comm_timeout=comm_timeout)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]  # no exception is left


def settle_threads(
    fn: Callable[[Communicator], T], size: int, timeout: float = 60, *, comm_timeout: float = 20
) -> list[T | BaseException]:
    """As `run_threads`, but return what the members raised instead of raising it."""
    comms = replica_communicators(world_of_one(), size, name="test", timeout=comm_timeout)
    outcomes: list[T | BaseException] = [RuntimeError("did not end")] * size

    def run(index: int) -> None:
        try:
            outcomes[index] = fn(comms[index])
        except BaseException as error:
            outcomes[index] = error
            with contextlib.suppress(Exception):
                comms[index].abort(repr(error))  # so that the others end too

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for index, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise AssertionError(f"member {index} still runs after {timeout} s")
    for comm in comms:
        with contextlib.suppress(Exception):
            comm.close()
    return outcomes


def stop(pid: int) -> None:
    """Stop a process; wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    until_stopped(pid)


def until_stopped(pid: int, seconds: float = 25) -> None:
    """Wait until each thread of a process is stopped, which one after the other finds out."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that ended
            stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
            if stats and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats):
                return
        time.sleep(0.005)
    raise AssertionError(f"process {pid} is not stopped after {seconds} s")


def shorten(comm: Communicator, seconds: float) -> None:
    """Give a communicator a timeout in which a busy machine might not have made it."""
    owners: list[Any] = [comm._dispatch.transport, comm._groups]
    for owner in owners:
        owner._timeout = seconds


def free_port() -> int:
    """Return a port on the loopback interface that nothing listens on now.

    It is another one for the next calls, and for all processes that run tests on this machine:
    whoever is to listen there has not started yet, and nobody else may take it meanwhile.
    """
    for port in itertools.islice(_own_ports(), _PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"each of this process's {_PORTS} ports has a listener")


@functools.cache
def _own_ports() -> Iterator[int]:
    """Claim ports, by a name that no other process can have until this one ends."""
    with socket.socket(socket.AF_UNIX) as claim:
        for first in range(_FIRST_PORT, _END_PORT, _PORTS):
            with contextlib.suppress(OSError):
                claim.bind(f"\0allreduce tests: ports from {first}")
                claim.detach()  # it stays open
                return itertools.cycle(range(first, first + _PORTS))
    raise AssertionError("other processes that run tests have all ports")


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Free all garbage now, and none in the block: other tests' would count in what is measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def script_of(fn: Callable[..., None], *arguments: Any) -> str:
    """Return a program that defines and calls `fn`, a function that uses only what it imports."""
    source = textwrap.dedent(inspect.getsource(fn))
    values = ", ".join(repr(argument) for argument in arguments)
    return f"{source}\n\n{fn.__name__}({values})\n"


def run_ranks(
    program: str | Callable[..., None],
    size: int,
    *,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    launcher: str = "env",
    arguments: Sequence[Any] = (),
) -> list[Result]:
    """Run a program as the ranks of one job, each in a process; all are killed at the deadline.

    Args:
        program: A program's text, or a self-contained function to call with `arguments`.
        size: How many ranks.
        timeout: Seconds until the test fails.
        env: Further environment variables.
        launcher: "env" starts the ranks itself, and returns one result per rank; "run" and "mpirun"
            start that launcher, whose result is the only one.
        arguments: For a function; what `repr` turns into a program's text.
    """
    text = program if isinstance(program, str) else script_of(program, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "program.py"
        script.write_text(text)
        python = [sys.executable, "-u", str(script)]
        commands = {
            "env": [python] * size,
            "run": [[sys.executable, "-m", "allreduce.run", "-n", str(size), str(script)]],
            "mpirun": [[str(Path(sys.executable).parent / "mpirun"), "-n", str(size), *python]],
        }[launcher]
        base = {**clean_environment(), **(env or {})}
        explicit = explicit_ranks(size) if launcher == "env" else [{}]
        environments = [{**base, **own} for own in explicit]
        return _run(commands, environments, Path(folder), timeout)


def clean_environment() -> dict[str, str]:
    """Return the environment without what says that this process takes part in a job."""
    prefixes = ("ALLREDUCE_", "PMI", "OMPI_", "SLURM_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    ours = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Processes compute with the kernels that this one has, though they import NumPy first.
    return {**environment, **ours, **openblas.choice(environment)}


def explicit_ranks(size: int) -> list[dict[str, str]]:
    """Return the variables that make processes the ranks of one job."""
    leader = f"127.0.0.1:{free_port()}"
    own = {"ALLREDUCE_SIZE": str(size), "ALLREDUCE_LEADER": leader, "ALLREDUCE_SECRET": "test"}
    return [{**own, "ALLREDUCE_RANK": str(rank)} for rank in range(size)]


def run_commands(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[Result]:
    """Run one process per command, with its environment; all are killed at the deadline."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(commands, environments, Path(folder), timeout)


def _run(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    timeout: float,
) -> list[Result]:
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        started = []
        for index, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            out = stack.enter_context((folder / f"{index}.out").open("w+"))
            err = stack.enter_context((folder / f"{index}.err").open("w+"))
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            stack.callback(_kill, process)
            started.append((process, out, err))
        late = []
        for index, (process, _, _) in enumerate(started):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(index)
                _kill(process)
        results = []
        for process, *streams in started:
            for stream in streams:
                stream.seek(0)
            results.append(Result(process.wait(), streams[0].read(), streams[1].read()))
        if late:
            raise AssertionError(f"processes {late} still ran after {timeout} s: {results}")
        return results


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its session's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def integers(count: int, dtype: str, member: int, limit: int = 8) -> np.ndarray[Any, Any]:
    """Return small whole numbers that depend on the member: their sums and products are exact."""
    return ((np.arange(count) * 7 + member * 3) % limit + 1).astype(dtype)
