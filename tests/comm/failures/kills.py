"""Jobs under the launcher whose ranks are killed at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.comm import Communicator, Work
from allreduce.comm.fused_update import update_init, updates
from tests.comm.cases.collective_cases import Array
from tests.comm.cases.updates import Side
from tests.harness import clean_environment, script_of

_START_SECONDS = 60.0
_END_SECONDS = 25.0
# The dead rank, as named by a call; or, while a group is made, by the leader.
_LOST = r": rank (\d+)(?: \(member \d+\))? \(process (\d+)(?: on \S+)?\) (?:died|is gone)"
_LAUNCH = (sys.executable, "-m", "allreduce.run", "-n")


@dataclass(frozen=True)
class Loss:
    """How one survivor learnt of a death."""

    survivor: int
    seconds: float  # from the kill to the error
    culprit: int
    descriptors: int  # how many more it had open after close() than before it joined


def every_call(
    comm: Communicator, own: random.Random, same: random.Random
) -> tuple[list[Array], list[Callable[[Array], Any]]]:
    """Return arrays of all sizes, ordinary and symmetric, and calls of all kinds to make of them.

    Args:
        comm: The communicator of the calls.
        own: Draws values that may differ between ranks.
        same: Draws values that must agree.
    """
    size = comm.size
    lengths = [size * n for n in (1, 1000, 100_000, 500_000)]
    arrays: list[Array] = [np.ones(n, "float32") for n in lengths]
    arrays += [comm.empty(n, "float32") for n in lengths]
    for array in arrays:
        array[:] = 1

    def passed_on(x: Array) -> list[Work]:
        sent = comm.send(x, (comm.rank + 1) % size, async_op=True)
        return [sent, comm.recv(x.copy(), (comm.rank - 1) % size, async_op=True)]

    def scattered(x: Array) -> None:
        root = same.randrange(size)
        comm.scatter(x if comm.rank == root else None, root=root)

    def grouped(x: Array) -> None:
        with contextlib.ExitStack() as stack:
            part = comm.split(0, -comm.rank)
            assert part is not None
            stack.callback(part.close)
            part.all_reduce(x)

    calls: list[Callable[[Array], Any]] = [
        lambda x: comm.barrier(),
        lambda x: comm.broadcast(x, root=same.randrange(size)),
        comm.all_reduce,
        lambda x: comm.all_reduce(x, op="max", out=x),
        comm.reduce_scatter,
        comm.all_gather,
        comm.all_to_all,
        lambda x: comm.reduce(x, root=same.randrange(size)),
        lambda x: comm.gather(x, root=same.randrange(size)),
        scattered,
        lambda x: comm.all_to_all(x, counts=[len(x) // size] * size),
        lambda x: comm.all_reduce([x, x[:3]]),
        lambda x: comm.all_gather_object({"rank": comm.rank, "text": "x" * (len(x) % 5000)}),
        lambda x: comm.empty(len(x)),
        grouped,
        lambda x: time.sleep(own.random() / 50),
        lambda x: [comm.all_reduce(x, async_op=True) for _ in range(3)],
        passed_on,
    ]
    if updates(comm):
        side = Side(comm)
        given = (side.gradients, side.values, side.momentum(), side.velocity)
        begin = update_init(comm, *given)
        calls.append(lambda x: [begin()])
    return arrays, calls


def _rank(folder: str, seed: int) -> None:
    """Make calls of all kinds, until a death is reported; tell when that was."""
    import faulthandler
    import gc
    import os
    import random
    import signal
    import time
    from pathlib import Path

    from allreduce import errors
    from allreduce.comm import Work, init, world
    from tests.comm.failures.kills import every_call

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    # Whom the launcher ends had time enough: where it was in is what a failure needs to tell.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    place = Path(folder)
    if os.environ["ALLREDUCE_TRANSPORT"] == "hierarchical":  # as if on two hosts
        os.environ["ALLREDUCE_HOST"] = str(int(os.environ["ALLREDUCE_RANK"]) % 2)
    world()
    before = descriptors()
    comm = init()
    rank = comm.rank
    comm.barrier()
    own, same = random.Random(f"{seed} {rank}"), random.Random(seed)
    arrays, calls = every_call(comm, own, same)
    (place / f"{rank}.new").write_text(str(os.getpid()))
    (place / f"{rank}.new").rename(place / f"{rank}.pid")
    try:
        while True:
            result = same.choice(calls)(same.choice(arrays))
            if isinstance(result, list):
                time.sleep(own.random() / 50)
                for work in (one for one in result if isinstance(one, Work)):
                    work.wait()
    except errors.PeerLostError as error:
        now = time.monotonic()
        comm.close()
        error.__traceback__ = error.__cause__ = error.__context__ = None  # what these hold
        gc.collect()
        text = f"{now} {descriptors() - before} {error}"
        (place / f"{rank}.new").write_text(text)
        (place / f"{rank}.new").rename(place / f"{rank}.lost")
        raise


@contextlib.contextmanager
def _job(transport: str, size: int, seed: int) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Start a job, wait until all its ranks work, and check in the end that nothing is left."""
    with tempfile.TemporaryDirectory() as folder:
        place, scratch = Path(folder), Path(folder) / "tmp"
        scratch.mkdir()
        script = place / "program.py"
        script.write_text(script_of(_rank, folder, seed))
        own = {"ALLREDUCE_TRANSPORT": transport, "ALLREDUCE_SECRET": folder, "TMPDIR": str(scratch)}
        own["PYTHONFAULTHANDLER"] = "1"  # a survivor that crashes would end in silence, too
        shared = set(os.listdir("/dev/shm"))
        with (place / "output").open("w+b") as output:
            process = subprocess.Popen(
                [*_LAUNCH, str(size), str(script)],
                env={**clean_environment(), **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                with _killed(process):
                    _await(place, "pid", size, process)
                    yield place, process
                    process.wait(_END_SECONDS)
                _check_nothing_left(folder, scratch, shared)
            except BaseException:
                output.seek(0)
                sys.stderr.write(output.read().decode(errors="replace"))
                raise


@contextlib.contextmanager
def _killed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process and its group in the end."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _check_nothing_left(secret: str, scratch: Path, shared: set[str]) -> None:
    """Check that neither processes of a job are left, nor files, nor memory.

    Args:
        secret: The job's.
        scratch: Where its temporary files would be.
        shared: The names of shared memory before it.
    """
    assert not _living(secret)
    until = time.monotonic() + _END_SECONDS
    left = _shared_memory() - shared
    while left and time.monotonic() < until:  # other tests' names come and go meanwhile
        time.sleep(0.1)
        left &= _shared_memory()
    assert not left
    assert not list(scratch.iterdir())


def _shared_memory() -> set[str]:
    """Return the names of shared memory that no process has, for no job's processes live on.

    Those of MPI and of the stand-in for NCCL are left out, which only other tests' jobs have.
    """
    others = ("mpich", "standin-nccl")
    names = {name for name in os.listdir("/dev/shm") if not name.startswith(others)}
    for place in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            names -= set(re.findall(r" /dev/shm/(\S+)", place.read_text(errors="replace")))
    return names


def _await(place: Path, ending: str, count: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_SECONDS
    while len(list(place.glob(f"*.{ending}"))) < count:
        assert process.poll() is None, "the job ended early"
        assert time.monotonic() < until, "the ranks did not start"
        time.sleep(0.01)


def _living(secret: str) -> list[int]:
    """List the processes of a job, which have its secret in their environment, a little later."""
    until = time.monotonic() + _END_SECONDS
    found = [0]
    while found and time.monotonic() < until:
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"ALLREDUCE_SECRET={secret}\0" in place.read_text(errors="replace"):
                    found.append(int(place.parent.name))
        time.sleep(0.02)
    return found


def kill_one(transport: str, size: int, seed: int) -> list[Loss]:
    """Kill a random rank of a job at a random moment, and return the survivors' reports."""
    draw = random.Random(seed)
    victim, delay = draw.randrange(size), draw.random() * 0.2
    with _job(transport, size, seed) as (place, process):
        pid = int((place / f"{victim}.pid").read_text())
        time.sleep(delay)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        process.wait(_END_SECONDS)
        losses = []
        for survivor in sorted(set(range(size)) - {victim}):
            told = place / f"{survivor}.lost"
            assert told.exists(), f"rank {survivor} told nothing of rank {victim} ({pid})"
            text = told.read_text()
            seconds, descriptors, message = text.split(" ", 2)
            found = re.search(_LOST, message)
            assert found, message
            assert "completed call #" not in message, message
            assert int(found[2]) == pid or int(found[1]) != victim
            took = float(seconds) - killed
            losses.append(Loss(survivor, took, int(found[1]), int(descriptors)))
        assert {loss.culprit for loss in losses} == {victim}, losses
    return losses


def kill_all(transport: str, size: int, seed: int) -> None:
    """Kill a job's launcher and all its ranks, one right after the other, at a random moment."""
    draw = random.Random(seed)
    with _job(transport, size, seed) as (place, process):
        pids = [int((place / f"{rank}.pid").read_text()) for rank in range(size)]
        time.sleep(draw.random() * 0.1)
        everybody = [*pids, process.pid]
        draw.shuffle(everybody)
        for pid in everybody:
            with contextlib.suppress(ProcessLookupError):  # it has died with the launcher
                os.kill(pid, signal.SIGKILL)
