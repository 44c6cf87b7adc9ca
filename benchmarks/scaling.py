"""Profile where several processes of the large MLP lose time against such that never meet.

    python -m allreduce.run -n 2 benchmarks/scaling.py

Both kinds of steps are done in turns by the same processes. Of the steps together, what a process
waits for the last one's computations is told apart from what is left when all have done theirs:
the updates in slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from trainers import ours
from workloads import WORKLOADS

import allreduce as ar
from allreduce.graph.frame import Frame
from allreduce.graph.owner import current_replicator
from allreduce.graph.replicator import Replicator

_STEPS, _SKIPPED, _ROUNDS = 15, 2, 8


class Marked:
    """A step whose first instruction's beginning, and last computation's end, are noted."""

    def __init__(self, step: Callable[[], object], frame: Frame) -> None:
        self._step = step
        self._begun: list[float] = []
        self._computed: list[float] = []
        assert frame._replay is not None, "it was replayed"
        steps = frame._replay.steps
        last = max(i for i, each in enumerate(steps) if each.__qualname__.startswith("Replay._run"))
        last_part = steps[last]

        def end() -> None:
            last_part()
            self._computed.append(time.perf_counter())

        steps[last] = end
        first_part = steps[0]  # which may be the last, too

        def begin() -> None:
            self._begun.append(time.perf_counter())
            first_part()

        steps[0] = begin

    def run(self) -> np.ndarray:
        """Do some steps; returns when each was called, began, had computed, and was over."""
        self._begun.clear()
        self._computed.clear()
        ends = [time.perf_counter()]
        for _ in range(_STEPS):
            self._step()
            ends.append(time.perf_counter())
        rows = zip(ends, self._begun, self._computed, ends[1:], strict=False)
        return np.array(list(rows))[_SKIPPED:]


def main() -> None:
    ar.set_seed(0)
    ar.config.threading.set_intra_op_parallelism_threads(1)
    strategy = ar.MultiWorkerMirroredStrategy()
    comm, case = strategy.communicator, WORKLOADS["mlp"]
    with strategy.scope():
        together = ours.Together(ours.STEPS["mlp"](case), strategy)
    apart = ours.Ours(ours.STEPS["mlp"](case))
    batch = next(case.batches(comm.rank, comm.size))
    for each in (together, apart) * 8:
        each.step(*batch)
    kinds = [
        Marked(lambda: apart.step(*batch), _frame(current_replicator(), apart)),
        Marked(lambda: together.step(*batch), _frame(strategy, together)),
    ]
    taken: list[list[np.ndarray]] = [[], []]
    for turn in range(_ROUNDS):
        for kind in (0, 1) if turn % 2 else (1, 0):
            comm.barrier()
            taken[kind].append(comm.all_gather(kinds[kind].run()[None]))
    if comm.rank == 0:
        _show(*(np.concatenate(each, axis=1) for each in taken))


def _frame(replicator: Replicator, side: ours.Ours) -> Frame:
    compiled = replicator.latest(side._step)
    assert compiled is not None, "a step has run"
    frame = compiled.executors[0].latest
    assert frame is not None, "a step has run"
    return frame


def _show(apart: np.ndarray, together: np.ndarray) -> None:
    """Print what steps consist of: of shape (process, step, moment)."""
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
