"""Ranks that live through many tests: threads, processes, and processes that mpirun starts.

Each kind is made of a transport and of one letter per rank, which names the host that the rank is
laid out on: "aab" is two ranks on one host, and one on another.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, Any

import pytest

from tests.cluster.processes import mpirun
from tests.comm.cases import (
    collective_cases,
    cross_process_cases,
    crossings,
    drawn,
    exchanges,
    group_cases,
    huge_cases,
    library_cases,
    memory_cases,
    message_cases,
    mpi_cases,
    operator_cases,
    thread_cases,
)
from tests.comm.ranks.hosts import lay_out
from tests.harness import ROOT, clean_environment, explicit_ranks, run_threads

_PLACES = (
    *(collective_cases, operator_cases, exchanges, crossings, drawn, message_cases, group_cases),
    *(huge_cases, library_cases, memory_cases, thread_cases, cross_process_cases, mpi_cases),
)
_WORKER = (sys.executable, "-m", "tests.comm.ranks.worker")
_START_SECONDS = _END_SECONDS = 30.0

Runner = Callable[..., list[Any]]  # (case, *arguments) -> what each rank returned


@dataclass(frozen=True)
class Ranks:
    """A kind of ranks: what carries their calls, and what starts them on such hosts."""

    transport: str
    start: Callable[[str, str], contextlib.AbstractContextManager[Runner]]


def case(name: str) -> Callable[..., Any]:
    """Look a case up."""
    found: Callable[..., Any] = next(getattr(p, name) for p in _PLACES if hasattr(p, name))
    return found


class ProcessPool:
    """`size` processes of one job that run one case after the other.

    Args:
        size: How many.
        transport: What carries their collectives; None has them choose.
        ranks: Each rank's variables, and the words before its command; on this host without it.
    """

    _ended = False

    def __init__(
        self,
        size: int,
        transport: str | None = "shared",
        ranks: Sequence[tuple[Mapping[str, str], Sequence[str]]] | None = None,
    ) -> None:
        chosen = {} if transport is None else {"ALLREDUCE_TRANSPORT": transport}
        self._processes = [
            _started([*before, *_WORKER], {**chosen, **own}, stdin=PIPE, stdout=PIPE)
            for own, before in ranks or [(own, ()) for own in explicit_ranks(size)]
        ]
        self._asked = [_there(process.stdin) for process in self._processes]
        self._answers = [_there(process.stdout) for process in self._processes]

    def run(self, name: str, *arguments: Any, timeout: float = 100) -> list[Any]:
        """Run a case on all ranks and return their results; a rank's error fails the test."""
        assert not self._ended, "an earlier case has ended these ranks"
        self._ended = True  # unless they answer well
        for asked in self._asked:
            asked.write(json.dumps([name, *arguments]) + "\n")
            asked.flush()
        deadline = time.monotonic() + timeout
        answers = [self._answer(index, deadline) for index in range(len(self._answers))]
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert not errors, "\n".join(errors)
        self._ended = False
        return [answer["result"] for answer in answers]

    def _answer(self, index: int, deadline: float) -> dict[str, Any]:
        stream = self._answers[index]
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"rank {index} did not answer"
        line = stream.readline()
        assert line, f"rank {index} ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> list[int]:
        """End the processes and return their exit codes."""
        for stream in self._asked:
            stream.close()
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(_END_SECONDS))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        for stream in self._answers:
            stream.close()
        return codes


class MpiPool(ProcessPool):
    """The same under mpirun, which keeps its ranks' own streams: they call this process back.

    Args:
        hosts: A letter for each rank's.
        transport: What carries their collectives.
        own: Further variables of all ranks.
    """

    def __init__(self, hosts: str, transport: str, own: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/pool")
            listener.listen(len(hosts))
            listener.settimeout(_START_SECONDS)
            launcher, *_ = mpirun(len(hosts), Path())
            command = [launcher]
            for host in hosts:
                own_host = ("-env", "ALLREDUCE_HOST", host)
                command += ["-n", "1", *own_host, *_WORKER, f"{folder}/pool", ":"]
            chosen = {"ALLREDUCE_TRANSPORT": transport, **own}
            self._processes = [_started(command[:-1], chosen, stdin=DEVNULL)]
            self._connections: dict[int, socket.socket] = {}
            try:
                for _ in hosts:
                    connection, _ = listener.accept()
                    with connection.makefile() as stream:
                        self._connections[int(stream.readline())] = connection
            except BaseException:
                self._processes[0].kill()
                raise
        ranks = [self._connections[rank] for rank in range(len(hosts))]
        self._asked = [rank.makefile("w") for rank in ranks]
        self._answers = [rank.makefile("r") for rank in ranks]

    def close(self) -> list[int]:
        """End the job and return its exit code."""
        for connection in self._connections.values():
            connection.shutdown(socket.SHUT_WR)
            connection.close()
        return super().close()


def _started(command: Sequence[str], own: Mapping[str, str], **streams: Any) -> Popen[str]:
    """Start a process of the pool."""
    environment = {**clean_environment(), **own}
    return Popen(command, cwd=ROOT, env=environment, text=True, **streams)


def _there(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextlib.contextmanager
def threads(transport: str, hosts: str) -> Iterator[Runner]:
    """Make ranks that are threads of this process, anew for each case."""

    def run(name: str, *arguments: Any) -> list[Any]:
        function = case(name)
        return run_threads(lambda comm: function(comm, *arguments), len(hosts))

    with pytest.MonkeyPatch.context() as patch:
        if transport == "hierarchical":
            lay_out(patch, hosts)
        else:
            patch.setenv("ALLREDUCE_TRANSPORT", transport)
        yield run


@contextlib.contextmanager
def processes(transport: str | None, hosts: str) -> Iterator[Runner]:
    """Make ranks that are processes."""
    with _ending(ProcessPool(len(hosts), transport, placed(hosts))) as run:
        yield run


@contextlib.contextmanager
def under_mpirun(transport: str, hosts: str) -> Iterator[Runner]:
    """Make ranks that mpirun starts; with MPI between hosts, where there are several."""
    between = {"ALLREDUCE_ACROSS": "mpi", "ALLREDUCE_TCP_INTERFACE": "127.0.0.1"}
    own = between if transport == "hierarchical" else {}
    with _ending(MpiPool(hosts, transport, own)) as run:
        yield run


def ranks_of(transport: str, hosts: str) -> contextlib.AbstractContextManager[Runner]:
    """Make processes, started as the transport needs it."""
    return (under_mpirun if transport == "mpi" else processes)(transport, hosts)


@contextlib.contextmanager
def _ending(pool: ProcessPool) -> Iterator[Runner]:
    """Check that a pool ends well."""
    try:
        yield pool.run
    finally:
        codes = pool.close()
    assert set(codes) == {0}


def placed(hosts: str) -> list[tuple[Mapping[str, str], Sequence[str]]]:
    """Return a pool's ranks, as if on hosts that are named by letters."""
    ranks = zip(explicit_ranks(len(hosts)), hosts, strict=True)
    return [({**own, "ALLREDUCE_HOST": host}, ()) for own, host in ranks]
