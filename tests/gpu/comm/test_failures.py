"""Dead, stopped and disagreeing ranks on GPUs: the same culprit on all, under both launchers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import launch

SIMULATED = pytest.mark.skipif(launch.has_driver(), reason="needs as many GPUs as ranks")
RANKS = 3
# The third one lays the ranks out on two hosts, between which TCP carries the control plane.
LAUNCHERS = {
    "run": [sys.executable, "-m", "allreduce.run", "-n", str(RANKS)],
    # Without its own end of the job when a rank has died, which may come before ranks can say why.
    "mpirun": [
        *(str(launch.ROOT / ".venv/bin/mpirun"), "-disable-auto-cleanup"),
        *("-n", str(RANKS), sys.executable),
    ],
    "hosts": [sys.executable, "-m", "allreduce.run", "-n", str(RANKS)],
}

FAILING = """
import os, signal, sys, threading, time
from pathlib import Path

if "hosts" in sys.argv:
    rank = int(os.environ["ALLREDUCE_RANK"])
    os.environ["ALLREDUCE_HOST"] = "ab"[rank // 2]
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
import numpy as np
import allreduce as ar
from allreduce import devices
from allreduce.comm.transports.nccl import library

folder, what = Path(sys.argv[1]), sys.argv[2]
ar.config.set_strict_collectives(what == "differs, strict")

def begin(timeout):
    comm, gpu = ar.init(timeout=timeout), devices.lookup("GPU:0")
    x = gpu.allocate(16).array(np.float32, (4,))
    comm.all_reduce(x)
    return comm, gpu, x

comm, gpu, x = begin(30)
if what.startswith(("stops", "sends")):  # with all imported that takes long on a busy machine
    comm.close()
    comm, gpu, x = begin(3)
pids = comm.all_gather_object(os.getpid())
(folder / f"begun.{comm.rank}").touch()
while len(list(folder.glob("begun.*"))) < comm.size:  # a death sooner would end the gathering
    time.sleep(0.01)

def is_watched():
    return "allreduce-nccl-watchdog" in [each.name for each in threading.enumerate()]

def status(handle):  # as if NCCL gave a number that its bindings do not know
    return "" if threading.current_thread() is threading.main_thread() else handle.unknown

def call():
    if what == "sends":
        return comm.send(x, dest=1 - comm.rank) if comm.rank < 2 else None
    if what == "stops, connecting" and comm.rank != 2:
        os.environ["STANDIN_NCCL_STALLS"] = "1"
    if comm.rank == 2:
        if what.startswith("STANDIN"):
            os.environ[what] = "1"
        if what == "unknown status":
            library.status = status
            while not comm.dead:
                time.sleep(0.01)
            assert is_watched()  # for other communicators
        if what.startswith("dies"):
            os._exit(3)
        if what.startswith("stops"):
            (folder / "2").write_text("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        if what.startswith("differs"):
            return comm.all_reduce(x[:3])
        if what == "reads":  # no wait, only a value: the calls behind it are compared before
            comm.all_reduce(x[:2], op="max", async_op=True)
            return devices.read(x)
    if what == "reads":
        comm.all_reduce(x[:2], async_op=True)
        return devices.read(x)
    if what == "dies, host":
        comm.all_reduce(x, async_op=True)
        time.sleep(0.3)  # the thread finds the death first
        comm.barrier()
    comm.all_reduce(x)

try:
    call()
    said = "nothing"
except ar.AllreduceError as error:
    said = f"{type(error).__name__}: {error}"
(folder / f"part.{comm.rank}").write_text(said)
(folder / f"part.{comm.rank}").rename(folder / str(comm.rank))
until = time.monotonic() + 30  # a launcher ends all ranks when the first one has ended
while not all((folder / str(rank)).exists() for rank in range(2 + (not what.startswith("dies")))):
    assert time.monotonic() < until
    time.sleep(0.01)
if what.startswith("stops"):
    os.kill(pids[2], signal.SIGKILL)
os._exit(0)
"""


def fail(folder: Path, launcher: str, what: str) -> list[str]:
    """Run the ranks; returns what each said, if it could."""
    script = folder / "failing.py"
    script.write_text(FAILING)
    environment = {**os.environ, "STANDIN_DEVICES": str(RANKS)}
    command = [*LAUNCHERS[launcher], str(script), str(folder), what, launcher]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    paths = [folder / str(rank) for rank in range(RANKS)]
    said = [path.read_text() for path in paths if path.exists()]
    assert len(said) >= 2, done.stderr[-3000:]
    return said


@SIMULATED
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_dead_rank_is_named_on_all(launcher: str, tmp_path: Path) -> None:
    for rank, text in enumerate(fail(tmp_path, launcher, "dies")):
        assert re.match(rf"PeerLostError: \[\w+\] rank {rank}: rank 2 ", text), text


@SIMULATED
def test_a_call_on_the_host_raises_the_cause_too(tmp_path: Path) -> None:
    for text in fail(tmp_path, "run", "dies, host"):
        assert text.startswith("PeerLostError"), text
        assert "rank 2" in text


@SIMULATED
@pytest.mark.parametrize(
    "launcher", ["run", "mpirun", pytest.param("hosts", marks=pytest.mark.torture)]
)
def test_a_stopped_rank_is_named_on_all(launcher: str, tmp_path: Path) -> None:
    known = "on" if launcher == "hosts" else "is stopped"  # of a process of another host less is
    for rank, text in enumerate(fail(tmp_path, launcher, "stops")[:2]):
        assert text.startswith(f"TimeoutError: [nccl] rank {rank}: all_reduce(float32[4]"), text
        assert re.search(rf"rank 2 has not made it \(process \d+ {known}", text), text


@SIMULATED
def test_a_stopped_rank_is_named_where_nccl_still_connects_to_it(tmp_path: Path) -> None:
    for rank, text in enumerate(fail(tmp_path, "run", "stops, connecting")[:2]):
        begins = (
            rf"TimeoutError: \[nccl\] rank {rank}: NCCL did not enqueue a call within 3 s; .* in "
        )
        call = (
            r"all_reduce\(float32\[4\], op='sum'\), rank 2 has not made it \(process \d+ is stopped"
        )
        assert re.match(begins + call, text), text


@SIMULATED
@pytest.mark.parametrize(
    ("what", "launcher"),
    [("differs", "run"), ("differs", "mpirun"), ("differs", "hosts"), ("reads", "run")],
)
def test_different_calls_are_found_without_strict_mode(
    what: str, launcher: str, tmp_path: Path
) -> None:
    found = fail(tmp_path, launcher, what)
    assert len(found) == RANKS
    calls = {
        "differs": ["all_reduce(float32[4], op='sum')", "all_reduce(float32[3], op='sum')"],
        "reads": ["all_reduce(float32[2], op='sum')", "all_reduce(float32[2], op='max')"],
    }[what]
    for rank, text in enumerate(found):
        assert text.startswith(f"MismatchError: [nccl] rank {rank}: call #2 on GPUs differs"), text
        for call, culprit in zip(calls, ("rank 0", "rank 2"), strict=True):
            assert re.search(rf"{re.escape(call)} at \S*failing.py:\d+ on {culprit}", text), text


@SIMULATED
def test_strict_mode_compares_before_a_call_is_enqueued(tmp_path: Path) -> None:
    found = fail(tmp_path, "run", "differs, strict")
    for text in found:
        assert text.startswith("MismatchError"), text
        assert "float32[4]" in text, text
        assert "float32[3]" in text, text


@SIMULATED
@pytest.mark.parametrize(
    ("what", "error"),
    {
        "STANDIN_NCCL_REFUSES": r"NCCL refused all_reduce\(float32\[4\], op='sum'\): ",
        "STANDIN_NCCL_FAILS": r"NCCL could not enqueue a call: SystemError \(",
        "unknown status": "watching calls on GPUs failed: AttributeError",
    }.items(),
)
def test_a_failure_of_one_rank_ends_all_at_once(what: str, error: str, tmp_path: Path) -> None:
    """The timeout is no shorter than the ranks wait for each other."""
    found = fail(tmp_path, "run", what)
    assert len(found) == RANKS
    for rank, text in enumerate(found[:2]):
        said = rf"PeerLostError: \[nccl\] rank {rank}: rank 2 aborted the communicator: {error}"
        assert re.match(said, text), text
    assert re.match(rf"InternalError: \[nccl\] rank 2: {error}", found[2]), found[2]


@SIMULATED
def test_two_members_that_both_send_first_are_told_so(tmp_path: Path) -> None:
    for rank, text in enumerate(fail(tmp_path, "run", "sends")[:2]):
        assert text.startswith(f"TimeoutError: [nccl] rank {rank}: send(float32[4], dest="), text
        assert "let one of them receive first" in text, text


LEAVING = """
import atexit, sys, time
from pathlib import Path

ended = Path(sys.argv[2])
atexit.register(lambda: comm.rank or ended.touch())  # after all that the library does there
import numpy as np
import allreduce as ar
from allreduce import devices

comm = ar.init(timeout=20)
x = devices.lookup("GPU:0").allocate(16).array(np.float32, (4,))
devices.write(x, 1)
comm.all_reduce(x, out=x)
if comm.rank == 1:
    until = time.monotonic() + 30
    while not ended.exists() and time.monotonic() < until:
        time.sleep(0.01)
    print(ended.exists(), devices.read(x).tolist(), flush=True)
if sys.argv[1] == "close":
    comm.close()
"""


@SIMULATED
@pytest.mark.parametrize("how", ["close", "end"])
def test_a_rank_leaves_while_others_go_on(how: str, tmp_path: Path) -> None:
    """NCCL's own end of a communicator would wait for the others."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    command = [sys.executable, "-m", "allreduce.run", "-n", "2", str(script), how]
    command += [str(tmp_path / "ended")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[1] True [2.0, 2.0, 2.0, 2.0]\n", done.stderr
