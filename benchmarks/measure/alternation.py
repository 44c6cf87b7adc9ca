"""The sides of a case: long-lived processes that train alternately, never at once.

A side that does not train waits for a line on a socket, without using a core.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers import TRAINERS
from workloads.base import Workload

from measure import jobs
from measure.contest import p99

_BENCHMARKS = Path(__file__).resolve().parents[1]
_START_SECONDS = 120.0  # for all of a side's processes to be there
_CHECKED, _FEWEST = 5, 3  # steps
_WARM_UP = 2  # steps of each turn that are not counted: others had the caches before
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass
class Measured:
    """The times and the report of one side in one case."""

    trainer: str
    ranks: int
    about: str
    losses: list[float]  # of the first steps, the mean of all processes
    seconds: list[float] = field(default_factory=list)  # of each step, until the last process's end
    backward: list[float] = field(default_factory=list)  # of gradients alone, in the same turns
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def after(self) -> float | None:
        """The seconds of a step besides its gradients, if these were timed."""
        return self.median - statistics.median(self.backward) if self.backward else None

    @property
    def p99(self) -> float:
        return p99(self.seconds)


def measure(
    workload: Workload, pythons: dict[str, Path], *, seconds: float, rounds: int, deadline: float
) -> list[Measured]:
    """Let the sides of a case that have an interpreter train alternately.

    Args:
        workload: The case.
        pythons: Each trainer's interpreter.
        seconds: For how long each side trains, about; in so many turns:
        rounds: …
        deadline: Seconds after which everything is ended.

    Raises:
        jobs.JobError: A process failed or did not end; its last words are in the message.
    """
    with ExitStack() as stack:
        sides = [
            stack.enter_context(_Side(workload, name, ranks, pythons[name], deadline))
            for name, ranks in workload.sides
            if name in pythons
        ]
        found = [side.begin() for side in sides]
        steps = [side.steps_in(seconds / rounds) for side in sides]
        for turn in range(rounds):
            for place in order_of(turn, len(sides)):
                found[place].seconds += sides[place].train(steps[place])
                if workload.backward:
                    found[place].backward += sides[place].train(steps[place], "backward")
        for side, each in zip(sides, found, strict=True):
            each.figures = side.ask("figures", seconds)[0]
        return found


def order_of(turn: int, sides: int) -> list[int]:
    """Return the order of sides in a turn: each begins with another one, forwards and backwards.

    Who always came behind the same one would always find the caches, and the processor's clock, as
    that one leaves them.
    """
    step = -1 if turn % 2 else 1
    return [(turn + step * place) % sides for place in range(sides)]


class _Side:
    """One side's processes; they end when it is left."""

    def __init__(
        self, workload: Workload, trainer: str, ranks: int, python: Path, deadline: float
    ) -> None:
        self._name = trainer, ranks
        self._title = f"{workload.name}: {TRAINERS[trainer].title}, {ranks} processes"
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._door = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._door.bind(f"{folder}/door")
        self._door.listen(ranks)
        self._error: jobs.JobError | None = None
        commands = _commands(workload, trainer, ranks, python, f"{folder}/door")
        self._thread = threading.Thread(target=self._run, args=(commands, trainer, deadline))
        self._thread.start()
        self._talks: list[Any] = []

    def _run(self, commands: Sequence[Sequence[str]], trainer: str, deadline: float) -> None:
        environ = {**_ONE_THREAD, **dict(TRAINERS[trainer].settings)}
        try:
            jobs.run(commands, environ=environ, cwd=_BENCHMARKS, deadline=deadline)
        except jobs.JobError as error:
            self._error = error

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self._talks:
            each.close()  # which ends the process's input
        self._door.close()
        self._thread.join()
        self._stack.close()

    def begin(self) -> Measured:
        """Wait for all processes, or threads of one, and have them do the first steps."""
        end = time.monotonic() + _START_SECONDS
        self._door.settimeout(0.2)
        here: list[Any] = []
        while sum(each["replicas"] for each in here) < self._name[1]:
            try:
                wire, _ = self._door.accept()
            except TimeoutError:
                if self._error is not None or time.monotonic() > end:
                    raise self._failure() from None
                continue
            with wire:
                self._talks.append(wire.makefile("rw"))
            here.append(self._hear(self._talks[-1]))
        losses = [
            statistics.fmean(each) for each in zip(*self.ask("losses", _CHECKED), strict=True)
        ]
        return Measured(*self._name, here[0]["about"], losses)

    def steps_in(self, seconds: float) -> int:
        """Return how many steps take about so long."""
        taken = statistics.median(self.train(_FEWEST))
        return max(_FEWEST, round(seconds / taken))

    def train(self, steps: int, task: str = "steps") -> list[float]:
        """Have all processes do so many steps, or a part of each; returns the seconds of each."""
        # A step is over when the last process is done with it.
        moments = [max(each) for each in zip(*self.ask(task, _WARM_UP + steps), strict=True)]
        taken = [end - start for start, end in itertools.pairwise(moments)]
        return taken[_WARM_UP:]

    def ask(self, task: str, amount: float) -> list[Any]:
        """Have all processes do something; returns the answer of each."""
        try:
            for each in self._talks:
                each.write(json.dumps([task, amount]) + "\n")
                each.flush()
            return [self._hear(each) for each in self._talks]
        except BrokenPipeError:
            raise self._failure() from None

    def _hear(self, talk: Any) -> Any:
        line = talk.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> jobs.JobError:
        for each in self._talks:  # of a process whose other threads may be well
            with contextlib.suppress(OSError):
                each.close()
        if self._talks or self._error is not None:
            self._thread.join()
        return self._error or jobs.JobError(f"{self._title}: its processes said nothing")


def _commands(
    workload: Workload, trainer: str, ranks: int, python: Path, address: str
) -> list[list[str]]:
    ports = [str(each) for each in jobs.free_ports(ranks)]
    told = [trainer, workload.name, "--address", address, "--ports", *ports]
    script = ["-m", "measure.side", *told]
    if TRAINERS[trainer].in_one:
        return [[str(python), *script]]
    if trainer != "ours" or ranks == 1:
        return [[str(python), *script, "--rank", str(rank)] for rank in range(ranks)]
    if workload.mpi:
        return [[_mpirun(), "-n", str(ranks), str(python), *script]]
    return [[str(python), "-m", "allreduce.run", "-n", str(ranks), *script]]


def _mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise jobs.JobError("there is no mpirun; pip install mpich brings one")
    return found
