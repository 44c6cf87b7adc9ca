"""Profile a step of the digits example on shared cores: costs and waits per process.

    python -m allreduce.run -n 8 benchmarks/crowded.py
    python -m allreduce.run -n 2 benchmarks/crowded.py

Each line is a mean of all processes, in microseconds a step: its time, the processor's in the
process and in the kernel, and how often it left the core by itself and was made to. `apart` is the
whole step of processes that never meet, `native` its part in native code; both also with an empty
barrier behind them, so that each process comes back to a core on which others were.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from trainers import ours
from workloads import WORKLOADS

import allreduce as ar
from allreduce.graph.replicate.owner import current_replicator

_STEPS, _ROUNDS = 150, 5
_COLUMNS = ("step", "user", "system", "left", "preempted")

Step = Callable[[], object]


def main() -> None:
    ar.set_seed(0)
    ar.config.threading.set_intra_op_parallelism_threads(1)
    strategy = ar.MultiWorkerMirroredStrategy()
    comm, case = strategy.communicator, WORKLOADS["digits"]
    with strategy.scope():
        together = ours.Together(ours.STEPS["digits"](case), strategy)
    apart = ours.Ours(ours.STEPS["digits"](case))
    batch = next(case.batches(comm.rank, comm.size))
    for each in (together, apart) * 5:
        each.step(*batch)
    native = _native_part(apart, batch)
    kinds: dict[str, Step] = {
        "native": native,
        "native, barrier": lambda: (native(), comm.barrier()),
        "apart": lambda: apart.step(*batch),
        "apart, barrier": lambda: (apart.step(*batch), comm.barrier()),
        "together": lambda: together.step(*batch),
    }
    taken: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
    for _ in range(_ROUNDS):
        for name, step in kinds.items():
            taken[name].append(comm.all_reduce(_measured(comm, step), op="mean"))
    if comm.rank == 0:
        print(f"{'':16s}", *(f"{name:>10s}" for name in _COLUMNS))
        for name, rows in taken.items():
            middle = [median(column) for column in zip(*rows, strict=True)]
            print(f"{name:16s}", *(f"{value:10.1f}" for value in middle))


def _native_part(apart: ours.Ours, batch: tuple[np.ndarray, ...]) -> Step:
    """Return the bound program of a step that has run, without the code around it."""
    compiled = current_replicator().latest(apart._step)
    assert compiled is not None, "a step has run"
    bound = compiled.executors[0].latest
    assert bound is not None, "a step has run"
    assert bound._replay is not None, "it was replayed"
    frame, replay = bound.frame, bound._replay
    feeds = dict(zip(frame.program.inputs, batch, strict=True))

    def run() -> None:
        moving = {**feeds, **frame.outputs.allocate()}
        frame.values.update(moving)
        assert replay.begin(list(moving.values())), "the arrays lie as they did"
        for step in replay.steps:
            step()

    return run


def _measured(comm: ar.Communicator, step: Step) -> np.ndarray:
    for _ in range(10):
        step()
    comm.barrier()
    before = _clocks()
    for _ in range(_STEPS):
        step()
    spent: np.ndarray = (_clocks() - before) / _STEPS
    return spent


def _clocks() -> np.ndarray:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = [time.perf_counter(), used.ru_utime, used.ru_stime]
    return np.array([*(each * 1e6 for each in seconds), used.ru_nvcsw, used.ru_nivcsw])


if __name__ == "__main__":
    main()
