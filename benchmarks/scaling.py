"""Profile where several processes of the large MLP lose time against such that never meet.

    python -m allreduce.run -n 2 benchmarks/scaling.py
    python benchmarks/scaling.py --devices 2            # logical devices of one process

Both kinds of steps are done in turns by the same processes, or threads of one. Of the steps
together, what a process waits for the last one's computations is told apart from what is left when
all have done theirs: the updates in slices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from trainers import ours
from workloads import WORKLOADS

import allreduce as ar
from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.execute.native_replay import NativeReplay
from allreduce.graph.replicate.owner import current_replicator
from allreduce.graph.replicate.replicator import Replicator

_STEPS, _SKIPPED, _ROUNDS = 15, 2, 8


class Marks:
    """When a replica's first instruction begins in each step, and its last computation ends."""

    def __init__(self, bound: BoundProgram) -> None:
        self.begun: list[float] = []
        self.computed: list[float] = []
        assert bound._replay is not None, "it was replayed"
        steps = bound._replay.steps
        last = max(
            i
            for i, each in enumerate(steps)
            if each.__qualname__.startswith(NativeReplay._run.__qualname__)
        )
        last_part = steps[last]

        def end() -> None:
            last_part()
            self.computed.append(time.perf_counter())

        steps[last] = end
        first_part = steps[0]  # which may be the last, too

        def begin() -> None:
            self.begun.append(time.perf_counter())
            first_part()

        steps[0] = begin


class Marked:
    """A step of this process's replicas."""

    def __init__(self, step: Callable[[], object], frames: Sequence[BoundProgram]) -> None:
        self._step = step
        self._marks = [Marks(each) for each in frames]

    def run(self) -> np.ndarray:
        """Do some steps.

        Returns:
            When each was called, began, had computed, and was over: `(replicas, steps, 4)`.
        """
        for each in self._marks:
            each.begun.clear()
            each.computed.clear()
        ends = [time.perf_counter()]
        for _ in range(_STEPS):
            self._step()
            ends.append(time.perf_counter())
        rows = [
            list(zip(ends, each.begun, each.computed, ends[1:], strict=False))
            for each in self._marks
        ]
        return np.array(rows)[:, _SKIPPED:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, help="so many of one process, and no processes")
    devices = parser.parse_args().devices
    ar.set_seed(0)
    ar.config.threading.set_intra_op_parallelism_threads(1)
    if devices:
        _of_devices(devices)
    else:
        _of_processes()


def _of_processes() -> None:
    strategy = ar.MultiWorkerMirroredStrategy()
    comm, case = strategy.communicator, WORKLOADS["mlp"]
    with strategy.scope():
        together = ours.Together(ours.STEPS["mlp"](case), strategy)
    apart = ours.Ours(ours.STEPS["mlp"](case))
    batch = next(case.batches(comm.rank, comm.size))
    for each in (together, apart) * 8:
        each.step(*batch)
    kinds = [
        Marked(lambda: apart.step(*batch), _frames(current_replicator(), apart._step)),
        Marked(lambda: together.step(*batch), _frames(strategy, together._step)),
    ]
    taken: list[list[np.ndarray]] = [[], []]
    for turn in range(_ROUNDS):
        for kind in (0, 1) if turn % 2 else (1, 0):
            comm.barrier()
            taken[kind].append(comm.all_gather(kinds[kind].run()))
    if comm.rank == 0:
        _show(*(np.concatenate(each, axis=1) for each in taken))


def _of_devices(count: int) -> None:
    """Compare one network mirrored over devices with one on each, and with the first of these."""
    ar.config.set_logical_devices("CPU", count)
    devices = [f"CPU:{index}" for index in range(count)]
    together, apart = _on_devices(devices), [_on_devices([each]) for each in devices]
    taken: dict[str, list[np.ndarray]] = {"one": [], "apart": [], "together": []}
    with ThreadPoolExecutor(count) as threads:
        for turn in range(_ROUNDS):
            for kind in list(taken)[turn % 3 :] + list(taken)[: turn % 3]:
                if kind == "apart":
                    found = list(threads.map(Marked.run, apart))
                else:
                    found = [together.run() if kind == "together" else apart[0].run()]
                taken[kind].append(np.concatenate(found))
    moments = {kind: np.concatenate(each, axis=1) for kind, each in taken.items()}
    _show(moments["apart"], moments["together"])
    steps = {kind: np.median(each[..., 3] - each[..., 0]) for kind, each in moments.items()}
    for kind in ("apart", "together"):
        ratio = count * steps["one"] / steps[kind]
        print(f"{count} {kind}: {ratio:.2f} times the samples/s of one device")


def _on_devices(devices: Sequence[str]) -> Marked:
    """Make steps of a separate network, mirrored over devices."""
    case, strategy = WORKLOADS["mlp"], ar.MirroredStrategy(devices)
    with strategy.scope():
        step = ours.STEPS["mlp"](case)
    batches = (next(case.batches(rank, len(devices))) for rank in range(len(devices)))
    shares = tuple(ar.PerReplica(each) for each in zip(*batches, strict=True))
    for _ in range(8):
        strategy.run(step, args=shares)
    return Marked(lambda: strategy.run(step, args=shares), _frames(strategy, step))


def _frames(replicator: Replicator, step: Any) -> list[BoundProgram]:
    compiled = replicator.latest(step)
    assert compiled is not None, "a step has run"
    return [each.latest for each in compiled.executors if each.latest is not None]


def _show(apart: np.ndarray, together: np.ndarray) -> None:
    """Print the parts of steps: of shape (process, step, moment)."""
    last = together[..., 2].max(axis=0)
    rows = {
        "apart: a step": apart[..., 3] - apart[..., 0],
        "  its computations": apart[..., 2] - apart[..., 1],
        "  updates, and what is returned": apart[..., 3] - apart[..., 2],
        "together: a step": together[..., 3] - together[..., 0],
        "  its computations ": together[..., 2] - together[..., 1],
        "  waiting for the other's": last - together[..., 2],
        "  updates, and what is returned ": together[..., 3] - last,
    }
    print(f"{'ms':34s}{'mean':>8s}{'median':>8s}{'90 %':>8s}")
    for name, seconds in rows.items():
        figures = (seconds.mean(), np.median(seconds), np.percentile(seconds, 90))
        print(f"{name:34s}", *(f"{1e3 * each:7.2f}" for each in figures))


if __name__ == "__main__":
    main()
