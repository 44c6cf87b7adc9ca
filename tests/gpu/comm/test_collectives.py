"""Collectives on arrays of GPUs, between two processes, against NumPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import allreduce as ar
from allreduce.comm import Communicator
from tests.gpu import launch
from tests.gpu.comm.collective_cases import OnGpu, run_case
from tests.harness import run_threads

RANK = """
import json, sys
import numpy as np
from ml_dtypes import bfloat16
import allreduce as ar
from allreduce import devices

comm = ar.init(timeout=30)
rank, gpu = comm.rank, devices.lookup("GPU:0")

def there(x):
    x = np.asarray(x)
    made = gpu.allocate(x.nbytes).array(x.dtype, x.shape)
    devices.write(made, x)
    return made

def here(x):
    return None if x is None else devices.read(x).tolist()

x = np.arange(6) + rank
f = there(x.astype(np.float32))
found = {
    "all_reduce": here(comm.all_reduce(f)),
    "mean": here(comm.all_reduce(f, op="mean")),
    "scaled": here(comm.all_reduce(f, prescale=3.0, postscale=0.5)),
    "scaled mean": here(comm.all_reduce(f, op="mean", prescale=4.0)),
    "max": here(comm.all_reduce(there(x.astype(np.int64)), op="max")),
    "brain half": here(comm.all_reduce(there(x.astype(bfloat16)))),
    "scaled brain half": here(comm.all_reduce(there(x.astype(bfloat16)), postscale=0.5)),
    "half": here(comm.all_reduce(there(x.astype(np.float16)))),
    "or": here(comm.all_reduce(there(x > 4), op="logical_or")),
    "in place": here(comm.all_reduce(g := there(x.astype(np.float64)), out=g)),
    "reduce": here(comm.reduce(f, root=1)),
    "broadcast": here(comm.broadcast(f, root=1)),
    "all_gather": here(comm.all_gather(f)),
    "all_gather counts": here(comm.all_gather(there(np.full(rank + 1, rank)), counts=[1, 2])),
    "reduce_scatter": here(comm.reduce_scatter(f)),
    "reduce_scatter counts": here(comm.reduce_scatter(f, counts=[2, 4])),
    "gather": here(comm.gather(f, root=0)),
    "scatter": here(comm.scatter(f if rank else None, root=1, out=there(np.zeros(3, np.float32)))),
    "all_to_all": here(comm.all_to_all(f)),
    "of the host": comm.all_reduce(np.arange(3.0)).tolist(),
    "object": comm.all_gather_object({"rank": rank}),
}
found["list"] = [here(each) for each in comm.all_reduce([f, g], op="max", out=[f, g])]
f = there(x.astype(np.float32))
if rank:
    comm.send(f, 0)
else:
    found["message"] = here(comm.recv(there(np.zeros(6, np.float32)), 1))
found["split"] = here(comm.split(0, -rank).all_gather(f))
class Foreign:  # another library's array, by its interface
    def __init__(self, x):
        self.owner = there(x)
        self.interface = {
            "shape": x.shape, "typestr": x.dtype.str, "version": 3, "strides": None,
            "data": (gpu.address(self.owner), False), "stream": None,
        }

    @property
    def __cuda_array_interface__(self):
        return self.interface

other = Foreign(x.astype(np.float32))
found["foreign"] = here(comm.all_reduce(other))
assert comm.all_reduce(other, out=other) is other
found["foreign in place"] = here(other.owner)
work = comm.all_reduce(f, async_op=True)
compute = gpu.own("compute")
found["asynchronous"] = here(work.synchronize(compute))
assert work.event() is not None
work.wait()

class Stream:  # as other libraries have it
    def __cuda_stream__(self):
        return 0, compute.address

work = comm.all_reduce(f, async_op=True)
found["another library's stream"] = here(work.synchronize(Stream()))
work.wait()
for wrong in sys.argv[1:]:
    try:
        eval(wrong)
    except ar.AllreduceError as error:
        found[wrong] = f"{type(error).__name__}: {error}"
print(json.dumps(found), flush=True)
"""

WRONG = {
    "comm.recv(f, tag=3)": "NCCL matches messages by their order alone",
    "comm.all_reduce(f, op='bitwise_xor')": "bitwise_xor does not carry float32",
    "comm.all_reduce(f, out=np.zeros(6, np.float32))": "out lies in the host's memory",
    "comm.all_reduce(f, out=there(np.zeros(5, np.float32)))": "out must have shape (6,)",
    "comm.all_reduce(f.reshape(2, 3).T)": "is not contiguous",
    "comm.all_reduce(there(x > 1), op='sum')": "does not carry bool",
    "comm.send(f, dest=7)": "send got dest=7; expected a rank from 0 to 1",
    "comm.recv(f, source=comm.rank)": "NCCL carries no message from a member to itself",
    "comm.all_reduce(f, async_op=True).synchronize(None)": "a stream of a GPU, but got NoneType",
    "comm.all_reduce(f, async_op=True).synchronize(devices.lookup('CPU:0').own('compute'))": (
        "all_reduce: synchronize takes a stream of a GPU, but got CpuStream"
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    script = tmp_path_factory.mktemp("ranks") / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "allreduce.run", "-n", "2", str(script), *WRONG]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    ranks: list[dict[str, object]] = sorted(map(json.loads, lines), key=str)
    return ranks


def both(found: list[dict[str, object]], name: str) -> list[object]:
    return [each[name] for each in found]


SUM = [1, 3, 5, 7, 9, 11]
FIRST, SECOND = [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "results"),
    {
        "all_reduce": [SUM, SUM],
        "mean": [[each / 2 for each in SUM]] * 2,
        "scaled": [[each * 1.5 for each in SUM]] * 2,
        "scaled mean": [[each * 2.0 for each in SUM]] * 2,
        "max": [SECOND, SECOND],
        "half": [SUM, SUM],
        "brain half": [SUM, SUM],
        "scaled brain half": [[each / 2 for each in SUM]] * 2,
        "or": [[False, False, False, False, True, True]] * 2,
        "in place": [SUM, SUM],
        "reduce": [None, SUM],
        "broadcast": [SECOND, SECOND],
        "all_gather": [FIRST + SECOND] * 2,
        "all_gather counts": [[0, 1, 1]] * 2,
        "reduce_scatter": [SUM[:3], SUM[3:]],
        "reduce_scatter counts": [SUM[:2], SUM[2:]],
        "gather": [FIRST + SECOND, None],
        "scatter": [SECOND[:3], SECOND[3:]],
        "all_to_all": [FIRST[:3] + SECOND[:3], FIRST[3:] + SECOND[3:]],
        "of the host": [[0.0, 2.0, 4.0]] * 2,
        "object": [[{"rank": 0}, {"rank": 1}]] * 2,
        "list": [[SECOND, SUM]] * 2,
        "foreign": [SUM, SUM],
        "foreign in place": [SUM, SUM],
        "split": [SECOND + FIRST] * 2,
        "asynchronous": [SUM, SUM],
        "another library's stream": [SUM, SUM],
    }.items(),
)
def test_results_are_numpys(
    found: list[dict[str, object]], name: str, results: list[object]
) -> None:
    assert sorted(both(found, name), key=str) == sorted(results, key=str)


def test_messages_arrive(found: list[dict[str, object]]) -> None:
    assert [each["message"] for each in found if "message" in each] == [SECOND]


def test_the_ranks_of_a_slurm_step_reduce() -> None:
    """Srun is imitated by its variables."""
    text = "import numpy as np; import allreduce as ar; from allreduce import devices;"
    text += "comm = ar.init(timeout=30);"
    text += "x = devices.lookup('GPU:0').allocate(4).array(np.int32, (1,)); devices.write(x, 3);"
    text += "print(devices.read(comm.all_reduce(x))[0])"
    step = {"JOB_ID": str(os.getpid()), "STEP_ID": "3", "STEP_NUM_TASKS": "2"}
    step |= {"STEP_NUM_NODES": "1", "STEP_NODELIST": "node1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", text],
            env={**os.environ, **{f"SLURM_{k}": v for k, v in (step | {"PROCID": rank}).items()}},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["6\n", "6\n"]
    finally:
        for rank in ranks:
            rank.kill()


CASES = (
    *("every_length", "into_out", "everybody_to_everybody", "unequal_exchange", "equal_bits"),
    *("in_flight", "started", "scaled", "lists", "threads_in_turn", "threads_waiting"),
)
GROUPS = (
    *("every_call_of_a_group", "without_color", "of_ranks", "made_while_calls_are_under_way"),
    *("nested", "closed_in_any_order", "works_of_groups", "messages", "messages_in_order"),
)


@pytest.mark.skipif(launch.has_driver(), reason="needs three GPUs")
@pytest.mark.parametrize(
    "cases", [CASES, GROUPS, pytest.param(("carried_pairs",), marks=pytest.mark.torture)]
)
def test_the_cases_of_collectives_on_cpus_hold_on_gpus(cases: tuple[str, ...]) -> None:
    script = Path(__file__).with_name("collective_cases.py")
    command = [sys.executable, "-m", "allreduce.run", "-n", "3", str(script), *cases]
    environment = {**os.environ, "STANDIN_DEVICES": "3", "PYTHONPATH": str(launch.ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[-1] for line in done.stdout.splitlines()] == list(cases)


BETWEEN_TWO = (*CASES, "messages")
ON_ONE = ("every_length", "into_out", "equal_bits", "in_flight", "scaled", "lists")


@pytest.mark.skipif(launch.has_driver(), reason="needs two GPUs")
@pytest.mark.parametrize(
    ("gpus", "case"),
    [(gpus, case) for gpus, cases in (("01", BETWEEN_TWO), ("00", ON_ONE)) for case in cases],
)
def test_the_cases_hold_between_threads_of_a_process(gpus: str, case: str) -> None:
    run_threads(
        lambda comm: run_case(case, OnGpu(comm, f"GPU:{gpus[comm.rank]}")),
        len(gpus),
        # Its kernels may have to be compiled.
        timeout=100,
        comm_timeout=90,
    )


def test_what_replicas_on_one_gpu_cannot_do_is_said_on_all() -> None:
    def member(comm: Communicator) -> None:
        there = OnGpu(comm)
        with pytest.raises(ar.UnsupportedError, match="logical devices of one GPU have no all_to"):
            there.all_to_all(np.zeros(2))
        assert (there.all_reduce(np.ones(2)) == 2).all()  # they go on

    run_threads(member, 2)


@pytest.mark.parametrize(("call", "text"), WRONG.items())
def test_what_cannot_be_done_is_explained(
    found: list[dict[str, object]], call: str, text: str
) -> None:
    for told in both(found, call):
        assert text in str(told)
