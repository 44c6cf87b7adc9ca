"""Run a command on simulated GPUs: the stand-ins for driver, NCCL, cuBLAS and NVRTC, preloaded.

    .venv-gpu/bin/python -m tests.gpu.launch -- mpirun -n 2 python mpi_examples/train.py

The library knows nothing of them: the real cuda.core, nccl4py and CuPy find them under the names of
their originals. They are built on first use, into build/gpu. `make gpu-test` makes `.venv-gpu`.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
LIBRARIES = ("libcuda.so.1", "libnccl.so.2", "libcublas.so.12", "libnvrtc.so.12")
PYTHON = ROOT / ".venv-gpu" / "bin" / "python"


def packages() -> Path:
    """Return the folder of the packages of `.venv-gpu`."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = ROOT / ".venv-gpu" / "lib" / version / "site-packages"
    return installed if installed.exists() else Path(sysconfig.get_path("purelib"))


def include(part: str) -> Path:
    """Return the headers of one of NVIDIA's wheels: `cuda_runtime` or `cuda_nvrtc`."""
    return packages() / "nvidia" / part / "include"


def build() -> Path:
    """Build what has changed of the stand-ins; return their folder."""
    out = BUILD / "lib"
    out.mkdir(parents=True, exist_ok=True)
    command = ["make", "--silent", "--jobs=2", f"--directory={ROOT / 'tests/gpu/standins'}"]
    command += [f"OUT={out}", f"CUDA_INCLUDE={include('cuda_runtime')}"]
    command += [f"NVRTC_INCLUDE={include('cuda_nvrtc')}"]
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several lanes of tests may ask at once
        made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"the stand-ins do not compile:\n{made.stdout}{made.stderr}")
    return out


def host_builds() -> str:
    """Name the version of what builds kernels for the host."""
    texts = [part.read_bytes() for part in sorted((ROOT / "tests/gpu/standins/host").iterdir())]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def has_driver() -> bool:
    """Say whether this machine has NVIDIA's driver; `STANDINS=1` says no."""
    return os.environ.get("STANDINS") != "1" and Path("/proc/driver/nvidia/version").exists()


def environment(devices: int = 2, **more: str) -> Mapping[str, str]:
    """Return the environment of a process on GPUs: real ones if there are any, else simulated.

    Args:
        devices: How many GPUs are simulated.
        more: Further variables. Of the stand-ins: STANDIN_SEED (not 0: delays before the work of
            streams, and the order of a kernel's threads), STANDIN_DELAY (their scale in
            microseconds), STANDIN_MEMORY (bytes of a device), STANDIN_PEERS (0: no peer access),
            STANDIN_DRIVER_VERSION, STANDIN_NAME (of GPUs), STANDIN_LOG (1: every call of the driver
            on stderr), STANDIN_NCCL_FULL (1: no shared memory for NCCL), STANDIN_NCCL_VERSION
            (as ncclGetVersion gives it), STANDIN_NCCL_REFUSES, STANDIN_NCCL_FAILS and
            STANDIN_NCCL_STALLS (the number of a communicator's call, from 0, that fails at once, or
            in the background, or never connects the ranks) and STANDIN_NCCL_TIMEOUT (seconds until
            a hang ends the process with status 86).
    """
    own = {**os.environ, "PATH": f"{PYTHON.parent}:{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
    # The library of that mpirun, which does not lie beside this Python.
    own.setdefault("MPI4PY_LIBMPI", str(ROOT / ".venv/lib/libmpi.so.12"))
    if not has_driver():
        libraries = build()
        own["LD_PRELOAD"] = ":".join(str(libraries / name) for name in LIBRARIES)
        own["STANDIN_DEVICES"] = str(devices)
        # cuda.core keeps what NVRTC compiled; real cubins must not be found there, nor old builds.
        own["XDG_CACHE_HOME"] = str(BUILD / "cache" / host_builds())
    return {**own, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("name a command")
    own = environment(options.devices)
    os.execvpe(command[0], command, own)


if __name__ == "__main__":
    main()
