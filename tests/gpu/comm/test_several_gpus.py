"""Ranks with several GPUs each: one NCCL communicator for every GPU that a rank calls with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import launch

RANKS = 2

SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import allreduce as ar
from allreduce import devices
from allreduce.comm.transports.nccl.transport import NcclTransport
from nccl.bindings import nccl

folder, what = Path(sys.argv[1]), sys.argv[2]
comm = ar.init(timeout=20)
gpus = [devices.lookup(f"GPU:{i}") for i in (0, 1)]
x, y = (gpu.allocate(16).array(np.float32, (4,)) for gpu in gpus)
signal.alarm(60)  # a stuck stream would hold the process for ever

def synchronize(gpu):
    gpu.own(devices.COLLECTIVE).synchronize()

def case_abort_fails():
    "The first communicator cannot be aborted."
    comm.all_reduce(x), comm.all_reduce(y)
    if comm.rank == 1:
        os._exit(3)
    abort, calls = nccl.comm_abort, []

    def fail_once(handle):
        calls.append(handle)
        if len(calls) == 1:
            raise ValueError("a status that the bindings do not know")
        abort(handle)

    nccl.comm_abort = fail_once
    try:
        comm.all_reduce(y)
    finally:
        synchronize(gpus[1])

def case_made_while_failing():
    "A failure is found when the second communicator is made, before anyone knows of this one."
    comm.all_reduce(x)
    meet, watch = NcclTransport._meet, comm._dispatch.transport.watch

    def meet_and_fail(self, collective, array, text):
        meet(self, collective, array, text)
        if text == "finish it" and comm.rank == 1:
            watch._fail(ar.TimeoutError("found by the thread"))

    NcclTransport._meet = meet_and_fail
    try:
        comm.all_reduce(y)
    finally:
        assert [each.aborted for each in watch.members] == [True, True]

def case_second_on_one():
    comm.all_reduce(x), comm.all_reduce(y)
    comm.all_reduce(y if comm.rank else x)

def case_new_on_one():
    comm.all_reduce(x)
    comm.all_reduce(y if comm.rank else x)

def case_strict():
    ar.config.set_strict_collectives(True)
    case_new_on_one()

try:
    globals()[f"case_{what}"]()
    said = "nothing"
except ar.AllreduceError as error:
    said = f"{type(error).__name__}: {error}"
(folder / str(comm.rank)).write_text(said)
until = time.monotonic() + 30  # a launcher ends all ranks when the first one has ended
while what != "abort_fails" and len(list(folder.iterdir())) < 2 and time.monotonic() < until:
    time.sleep(0.01)
os._exit(0)
"""


def run(folder: Path, what: str) -> list[str]:
    """Run the ranks with two GPUs each; returns what each said, "" if it could not."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    (said := folder / "said").mkdir()
    command = [sys.executable, "-m", "allreduce.run", "-n", str(RANKS), str(script)]
    own = {**os.environ, "STANDIN_DEVICES": "4"}
    done = subprocess.run(
        [*command, str(said), what], env=own, capture_output=True, text=True, timeout=100
    )
    paths = [said / str(rank) for rank in range(RANKS)]
    found = [path.read_text() if path.exists() else "" for path in paths]
    assert any(found), done.stderr[-3000:]
    return found


pytestmark = pytest.mark.skipif(launch.has_driver(), reason="needs two GPUs for each rank")


def test_a_communicator_that_cannot_be_aborted_keeps_no_other_from_it(tmp_path: Path) -> None:
    said, _ = run(tmp_path, "abort_fails")
    assert said.startswith("PeerLostError: [nccl] rank 0: rank 1 "), said


def test_a_communicator_that_is_made_during_a_failure_is_aborted(tmp_path: Path) -> None:
    for said in run(tmp_path, "made_while_failing"):
        assert said.startswith("TimeoutError"), said
        assert "found by the thread" in said


@pytest.mark.parametrize("what", ["second_on_one", "new_on_one", "strict"])
def test_calls_with_different_gpus_of_the_ranks_are_a_mismatch(what: str, tmp_path: Path) -> None:
    for rank, said in enumerate(run(tmp_path, what)):
        assert re.match(rf"MismatchError: \[\w+\] rank {rank}: ", said), said
        assert re.search(r"all_reduce\(float32\[4\], op='sum'\) at \S+ (on rank 0|here)", said), (
            said
        )
        assert re.search(r"op='sum', communicator=1\) at \S+ (on rank 1|here)", said), said
        assert what == "strict" or "every rank must call with the GPU of the same one" in said
