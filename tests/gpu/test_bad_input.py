"""What is missing or wrong about GPUs has an error or a log line that says what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from allreduce import events
from allreduce.comm.transports.nccl import agreement
from allreduce.comm.transports.nccl.agreement import Facts
from allreduce.errors import UnsupportedError
from tests.gpu import launch

pytestmark = pytest.mark.skipif(launch.has_driver(), reason="the stand-ins lack what is asked for")

ALONE = """
import numpy as np
import allreduce as ar

def attempt(use):
    try:
        print(use())
    except ar.AllreduceError as error:
        print(type(error).__name__, error, flush=True)

def on_gpu():
    with ar.device("GPU:0"):
        return ar.ops.exp(np.zeros(3, np.float32)).device

attempt(on_gpu)
attempt(lambda: ar.init(transport="nccl"))
attempt(lambda: ar.config.set_logical_devices("GPU", 2))
ar.config.set_soft_device_placement(True)
print("soft", on_gpu().local, on_gpu().local)
print("devices", [each.local for each in ar.MirroredStrategy().devices])
"""


def alone(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"LD_PRELOAD": ""}, "no NVIDIA driver is installed (libcuda.so.1 was not found)"),
        ({"STANDIN_DEVICES": "0"}, "the driver shows no GPU: cuInit gave CUDA_ERROR_NO_DEVICE"),
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "the driver shows no GPU (CUDA_VISIBLE_DEVICES=''): cuInit gave CUDA_ERROR_NO_DEVICE",
        ),
        (
            {"STANDIN_DRIVER_VERSION": "11080"},
            "the NVIDIA driver is too old: it supports CUDA 11.8, and the installed libraries are "
            "for 12.",
        ),
    ],
    ids=["no driver", "no device", "hidden", "old driver"],
)
def test_why_there_is_no_gpu(variables: dict[str, str], why: str) -> None:
    done = alone(ALONE, **variables)
    placed, nccl, logical, soft, devices = done.stdout.splitlines()
    assert placed.startswith("DeviceError"), done.stderr
    assert why in placed
    assert nccl.startswith("UnsupportedError [nccl] rank 0: transport 'nccl' is for GPUs"), nccl
    assert why in nccl
    assert logical.startswith("DeviceError")
    assert why in logical
    assert (soft, devices) == ("soft CPU:0 CPU:0", "devices ['CPU:0']")
    assert done.stderr.count("/device:GPU:0, which does not exist here") == 1  # one warning


def test_too_little_memory_names_the_largest_parts() -> None:
    text = """
import numpy as np
import allreduce as ar
strategy = ar.MirroredStrategy(["GPU:0"])
with strategy.scope():
    model = ar.nn.Sequential([ar.nn.Dense(3000, activation="relu"), ar.nn.Dense(10)])
    model.compile(optimizer="adam", loss="mean_squared_error")
model.fit(np.ones((64, 3000), np.float32), np.ones((64, 10), np.float32), verbose=0)
"""
    done = alone(text, STANDIN_MEMORY=str(64 << 20))
    said = done.stderr[done.stderr.rindex("OutOfMemoryError") :]
    assert "no memory on /job:worker/replica:0/task:0/device:GPU:0 for" in said
    assert "bytes are free, and this process has" in said
    assert "use a smaller model or batch" in said
    assert "which was asked for" in said.splitlines()[1], said


LIBRARIES = """
from cuda import pathfinder

load = pathfinder.load_nvidia_dynamic_lib

def find(name):
    if name in ("cublas", "nvrtc"):
        raise pathfinder.DynamicLibNotFoundError(f"Failure finding lib{name}.so:\\n No such file")
    return load(name)

pathfinder.load_nvidia_dynamic_lib = find
import numpy as np
import allreduce as ar
x = np.ones((2, 2), np.float32)
for function in (lambda x: x @ x, ar.ops.exp):
    try:
        ar.MirroredStrategy(["GPU:0"]).run(ar.function(function), (x,))
    except ar.UnsupportedError as error:
        print(error)
"""


def test_what_is_not_installed_is_said(tmp_path: Path) -> None:
    preload = re.sub(r"[^:]*lib(cublas|nvrtc)[^:]*:?", "", os.environ["LD_PRELOAD"])
    done = alone(LIBRARIES, LD_PRELOAD=preload, XDG_CACHE_HOME=str(tmp_path))
    remedy = "No such file; pip install 'allreduce[cuda12]' (or [cuda13])"
    assert done.stdout.splitlines() == [
        f"operator 'matmul': cuBLAS is not installed: Failure finding libcublas.so: {remedy}",
        f"operator 'exp': NVRTC is not installed: Failure finding libnvrtc.so: {remedy}",
    ], done.stderr


RANKS = """
import os, sys
import numpy as np
import allreduce as ar
from allreduce import devices

what = sys.argv[1]
if what == "versions" and os.environ["ALLREDUCE_RANK"] == "1":
    os.environ["STANDIN_NCCL_VERSION"] = "22703"
comm = ar.init(timeout=20)
if comm.rank == 1:
    if what == "package":
        sys.modules["nccl"] = None
    if what == "shared memory":
        from allreduce.comm.transports.nccl import library
        library._LEAST_SHARED = 1 << 60
        os.environ["STANDIN_NCCL_FULL"] = "1"
if what == "network" and comm.rank == 0:
    from nccl.bindings import nccl

    def fail():
        raise nccl.NCCLError(nccl.Result.SystemError)

    nccl.get_unique_id = fail
x = devices.lookup("GPU:0").allocate(16).array(np.float32, (4,))
if what == "host" and comm.rank == 1:
    x = np.zeros(4, np.float32)
try:
    comm.all_reduce(x)
    print("reduced", flush=True)
except ar.AllreduceError as error:
    print(type(error).__name__, error, flush=True)
    comm.close()
"""


@pytest.mark.parametrize(
    ("what", "texts"),
    {
        "package": ["UnsupportedError", "NCCL cannot be used on rank 1: ", "pip install"],
        "host": ["all_reduce(float32[4], op='sum') at", "nccl(first call of arrays on GPUs) at"],
        "network": ["NCCL could not make a unique id: ", "NCCL_SOCKET_IFNAME chooses"],
        "shared memory": ["NCCL could not make a communicator: SystemError", "--shm-size=1g"],
    }.items(),
)
def test_what_keeps_ranks_from_nccl_is_said_on_all(
    what: str, texts: list[str], tmp_path: Path
) -> None:
    done = ranks(tmp_path, what)
    said = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert len(said) == 2, done.stderr[-2000:]
    for line in said:
        for text in texts:
            assert text in line, line


def without(function: str, folder: Path) -> str:
    """Make a libnccl that lacks a function; returns its path."""
    name, library = function.encode() + b"\0", folder / "libnccl.so.2"
    whole = (launch.build() / library.name).read_bytes()
    assert name in whole
    library.write_bytes(whole.replace(name, name.upper()))
    return str(library)


def ranks(folder: Path, what: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks of RANKS."""
    script = folder / "rank.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "allreduce.run", "-n", "2", str(script), what]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_library_that_lacks_a_function_is_found_at_the_start(tmp_path: Path) -> None:
    function = "ncclRedOpDestroy"  # without the check, the end of the first scaled sum
    old = without(function, tmp_path)
    preload = re.sub(r"[^:]*libnccl[^:]*", old, os.environ["LD_PRELOAD"])
    done = ranks(tmp_path, "old", LD_PRELOAD=preload, STANDIN_NCCL_VERSION="21212")
    said = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert len(said) == 2, done.stderr[-2000:]
    for line in said:
        assert line.startswith("UnsupportedError [nccl] rank "), line
        assert "NCCL cannot be used on rank 0, rank 1: NCCL 2.12.12 " in line
        assert f"has no {function}; expected NCCL 2.14 or later" in line
        assert "pip install" in line
        assert "reduced" not in line


def test_of_two_libraries_the_one_that_is_called_is_looked_at(tmp_path: Path) -> None:
    """A complete one is loaded first, but an older one's functions are everywhere visible."""
    old = without("ncclRedOpDestroy", tmp_path)
    text = "import ctypes\n"
    text += f"first = ctypes.CDLL({str(launch.build() / 'libnccl.so.2')!r})\n"
    text += f"second = ctypes.CDLL({old!r}, mode=ctypes.RTLD_GLOBAL)\n"
    text += "from allreduce.comm.transports.nccl import library; library.version()"
    preload = re.sub(r"[^:]*libnccl[^:]*:?", "", os.environ["LD_PRELOAD"])
    done = alone(text, LD_PRELOAD=preload)
    assert "has no ncclRedOpDestroy; expected NCCL 2.14 or later" in done.stderr, done.stderr
    assert f"found {old}" in done.stderr


def test_ranks_with_different_libraries_are_told(tmp_path: Path) -> None:
    done = ranks(tmp_path, "versions")
    assert done.stdout.count("reduced") == 2, done.stderr[-2000:]
    assert "2.32.3 on rank 0; 2.27.3 on rank 1; install the same one for all" in done.stderr


def test_two_libraries_in_one_process_are_told(tmp_path: Path) -> None:
    copy = tmp_path / "libnccl.so.2"
    copy.write_bytes((launch.build() / copy.name).read_bytes())
    text = f"import ctypes; other = ctypes.CDLL({str(copy)!r})\n"
    text += "from allreduce.comm.transports.nccl import library; print(library.version())"
    done = alone(text)
    assert done.stdout == "2.32.3\n", done.stderr
    assert "two NCCL libraries are loaded in this process: " in done.stderr
    assert str(copy) in done.stderr


def test_more_ranks_than_gpus_are_refused_on_all(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import allreduce as ar\n"
        "try:\n"
        "    ar.init(timeout=20)\n"
        "except ar.UsageError as error:\n"
        "    print(error, flush=True)\n"
    )
    command = [sys.executable, "-m", "allreduce.run", "-n", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("too few for one each; start 2 ranks here, or let") == 3, done.stderr


@pytest.mark.parametrize("leave", ["", "1"])
def test_ranks_that_share_a_gpu_need_nccls_leave_too(leave: str, tmp_path: Path) -> None:
    more = {"ALLREDUCE_SHARE_GPUS": "on", "NCCL_MULTI_RANK_GPU_ENABLE": leave}
    done = ranks(tmp_path, "reduce", CUDA_VISIBLE_DEVICES="1", **more)
    told = "reduced" if leave else "rank 0 and rank 1 use one GPU, which NCCL refuses; give each a"
    assert done.stdout.count(told) == 2, done.stderr[-2000:]


TWO_GPUS = """
import numpy as np
import allreduce as ar
from allreduce import devices

comm = ar.init()
x, y = (devices.lookup(f"GPU:{n}").allocate(16).array(np.float32, (4,)) for n in (0, 1))
for call in (
    lambda: comm.all_reduce(x, out=y),
    lambda: comm.all_reduce([x, y]),
    lambda: comm.all_reduce([x, np.zeros(4, np.float32)]),
    lambda: comm.all_reduce(np.zeros(4, np.float32), out=x),
):
    try:
        call()
    except ar.UsageError as error:
        print(error)
"""


def test_a_call_of_arrays_on_two_devices_is_refused() -> None:
    done = alone(TWO_GPUS)
    told = [line.partition(": all_reduce: ")[2] for line in done.stdout.splitlines()]
    ends = "but the call's other array on GPU:0; copy one of them, so that both lie on one device"
    assert told == [
        f"out lies in GPU:1's memory, {ends}",
        f"item 1 of the list: the array lies in GPU:1's memory, {ends}",
        f"item 1 of the list: the array lies in the host's memory, {ends}",
        f"the array lies in the host's memory, {ends}",
    ], done.stderr


GOOD = Facts("of a GPU", "2.32.3", "", "")


def called(member: int) -> str:
    return f"rank {member}"


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (GOOD, "rank 0 and rank 1 use one GPU, which NCCL refuses"),
        (
            Facts("of another", "", 'Failure finding "libnccl.so.2"', ""),
            'NCCL cannot be used on rank 1: Failure finding "libnccl.so.2"; pip install',
        ),
        (
            Facts("of a slice", "2.32.3", "", "NVIDIA A100 MIG 1g.5gb"),
            "NCCL does not connect slices of GPUs (MIG), which rank 1 (NVIDIA A100 MIG 1g.5gb)",
        ),
    ],
)
def test_members_that_nccl_does_not_connect(second: Facts, text: str) -> None:
    facts = [Facts.unpack(each.pack()) for each in (GOOD, second)]
    with pytest.raises(UnsupportedError, match=re.escape(text)) as raised:
        agreement.check("[nccl] rank 0", facts, called)
    assert raised.value.everywhere


def test_different_libraries_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events.logger, "handlers", [caplog.handler])
    agreement.check("[nccl] rank 0", [GOOD, Facts("of another", "2.27.3", "", "")], called)
    assert "2.32.3 on rank 0; 2.27.3 on rank 1; install the same one for all" in caplog.text


def test_a_slice_is_known_by_its_name() -> None:
    text = "from allreduce import devices; print(devices.lookup('GPU:0').partition)"
    assert alone(text, STANDIN_NAME="NVIDIA A100 MIG 1g.5gb").stdout == "NVIDIA A100 MIG 1g.5gb\n"
