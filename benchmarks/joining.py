"""Time the start of many ranks on one host: process, imports, joining, first call.

    python -m allreduce.run -n 32 benchmarks/joining.py
    mpirun -n 32 python benchmarks/joining.py
    mpirun -n 32 python benchmarks/joining.py --side mpi4py

Prints the seconds from the first rank's start until the last one was ready, and each rank's
processor time until then. NumPy's import is listed separately, because every numeric program waits
for it. `--side gloo` needs PyTorch.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import numpy as np

_STAGES = ("started", "NumPy imported", "library imported", "joined", "first all_reduce")
_PORT = 29500  # gloo's, on this host


class Stages:
    """When this rank reached each stage, on the host's clock, and its processor time until then."""

    def __init__(self) -> None:
        self.reached = [(_process_started(), 0.0)]

    def mark(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.reached.append((now, used.ru_utime + used.ru_stime))


def _process_started() -> float:
    """Return when this process began, in seconds since the host's boot."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # proc_pid_stat(5): starttime
    return ticks / os.sysconf("SC_CLK_TCK")


def _ours(stages: Stages) -> tuple[int, np.ndarray]:
    import allreduce as ar

    stages.mark()
    comm = ar.init()
    stages.mark()
    comm.all_reduce(np.ones(1, np.float32))
    stages.mark()
    return comm.rank, comm.all_gather(np.array([stages.reached]))


def _mpi4py(stages: Stages) -> tuple[int, np.ndarray]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    stages.mark()
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    stages.mark()
    comm = MPI.COMM_WORLD
    comm.Allreduce(np.ones(1, np.float32), np.empty(1, np.float32))
    stages.mark()
    mine = np.array([stages.reached])
    everybody = np.empty((comm.Get_size(), *mine.shape[1:]))
    comm.Allgather(mine, everybody)
    rank = comm.Get_rank()
    MPI.Finalize()
    return rank, everybody


def _gloo(stages: Stages) -> tuple[int, np.ndarray]:
    import torch
    from torch import distributed

    stages.mark()
    names = ("ALLREDUCE_RANK", "ALLREDUCE_SIZE")
    if names[0] not in os.environ:
        names = ("PMI_RANK", "PMI_SIZE")
    rank, size = (int(os.environ[name]) for name in names)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{_PORT}", rank=rank, world_size=size)
    stages.mark()
    distributed.all_reduce(torch.ones(1))
    stages.mark()
    everybody = torch.empty(size, len(stages.reached), 2, dtype=torch.float64)
    mine = torch.tensor([stages.reached], dtype=torch.float64)
    distributed.all_gather_into_tensor(everybody, mine)
    return rank, everybody.numpy()


_SIDES = {"ours": _ours, "mpi4py": _mpi4py, "gloo": _gloo}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time what ranks on one host take to be ready.")
    parser.add_argument("--side", choices=_SIDES, default="ours")
    side = parser.parse_args().side
    stages = Stages()
    stages.mark()
    rank, everybody = _SIDES[side](stages)
    if rank != 0:
        return
    seconds, processor = everybody[..., 0], everybody[..., 1]
    print(f"{side}, {len(everybody)} ranks: seconds since the first started, processor of each")
    ready = seconds.max(0) - seconds.min()
    for name, last, used in zip(_STAGES, ready, processor.mean(0), strict=True):
        print(f"{name:18s}{last:8.2f}{used:8.3f}")


if __name__ == "__main__":
    main()
