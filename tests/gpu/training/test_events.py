"""Every event of a program is needed: without any one of them, values are wrong or a step fails."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.gpu import launch

SEEDS = range(1, 21)
PROGRAMS = ("training", "exchange", "two devices")


def remove_event(removed: int) -> list[str]:
    """Have programs leave out one of their waits, by number; returns the list of all, as made."""
    from allreduce.graph.execute.bound_program import BoundProgram
    from allreduce.graph.execute.queues import Queues

    found: list[str] = []

    def keeps(program: Any, index: int, awaited: int) -> bool:
        nodes = [program.instructions[each].node.op for each in (index, awaited)]
        found.append(" waits for ".join(nodes))
        return len(found) - 1 != removed

    ordered, behind = Queues.ordered, BoundProgram._behind

    def ordered_without(self: Any, index: int, step: Any) -> Any:
        program, mine = self._program, list(self._program.instructions)
        kept = [i for i in mine[index].waits if i not in self._events or keeps(program, index, i)]
        mine[index] = replace(mine[index], waits=tuple(kept))
        self._program = replace(program, instructions=tuple(mine))
        try:
            return ordered(self, index, step)
        finally:
            self._program = program

    def behind_without(self: Any, index: int, waits: Any, step: Any) -> Any:
        places = {each.node.id: i for i, each in enumerate(self.program.instructions)}
        kept = [i for i in waits if keeps(self.program, index, places[i])]
        return behind(self, index, kept, step)

    setattr(Queues, "ordered", ordered_without)  # noqa: B010
    setattr(BoundProgram, "_behind", behind_without)  # noqa: B010
    return found


def run_program(name: str, removed: int) -> None:
    """Run a program's steps; print the events and the values."""
    import numpy as np

    import allreduce as ar

    events = remove_event(removed)
    ar.set_seed(0)
    ar.config.set_buckets(1)
    replicas = 1 if name == "two devices" else 2
    strategy = ar.MirroredStrategy(["GPU:0", "GPU:1"], devices_per_replica=2 // replicas)
    with strategy.scope():
        first = ar.Variable(np.linspace(-1, 1, 64 * 96, dtype=np.float32).reshape(64, 96))
        second = ar.Variable(np.linspace(1, -1, 96 * 32, dtype=np.float32).reshape(96, 32))
        optimizer = ar.optim.SGD(0.01, momentum=0.9)

    @ar.function
    def training(x: Any) -> Any:
        hidden = ar.ops.tanh(x @ first)
        loss = ar.ops.mean(ar.ops.square(hidden @ second), axis=1)
        optimizer.minimize(loss, [first, second])
        return loss

    @ar.function
    def exchange(x: Any) -> Any:
        rows = ar.ops.tanh(x @ first) @ second
        joined = ar.ops.all_reduce(ar.ops.sum(rows, axis=0))
        again = ar.ops.all_reduce(ar.ops.sum(ar.ops.square(rows - joined), axis=0))
        return ar.ops.sum(rows * again + joined, axis=1)

    @ar.function
    def two_devices(x: Any) -> Any:
        hidden = ar.ops.tanh(x @ first)
        with ar.device("GPU:1"):
            there = ar.ops.exp(ar.ops.sin(hidden * 2.0) * 0.5)
        return there @ second + hidden @ second

    step = {"training": training, "exchange": exchange, "two devices": two_devices}[name]
    values = []
    for number in range(5):
        rows = np.sin(np.arange(replicas * 48 * 64) + number).astype(np.float32)
        parts = np.split(rows.reshape(-1, 64), replicas)
        results = [strategy.run(step, (ar.PerReplica(tuple(parts)),))]
        values += [np.asarray(each).tobytes().hex() for each in results[0].values]
    print(json.dumps([events, values]))


def tried(name: str, removed: int, seed: int) -> Any:
    """Run a program in a process of its own; returns its events and values, None after a fault."""
    text = f"from {__name__} import run_program as f; f({name!r}, {removed})"
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "STANDIN_SEED": str(seed), "STANDIN_NCCL_TIMEOUT": "5"},
        cwd=launch.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


@functools.cache
def whole(name: str) -> Any:
    return tried(name, -1, 0)


@pytest.mark.skipif(launch.has_driver(), reason="only simulated GPUs delay their streams by seeds")
@pytest.mark.torture
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_without_one_of_its_events_goes_wrong(name: str) -> None:
    events, values = whole(name)
    assert len(events) >= 4
    assert tried(name, -1, 7) == [events, values]  # delays alone change nothing
    needless = []
    distinct = len(events) if name == "two devices" else len(events) // 2  # replicas have the same
    for removed, event in enumerate(events[:distinct]):
        if event.endswith("feed"):  # the host has waited for the copy
            continue
        if all(tried(name, removed, seed) == [events, values] for seed in SEEDS):
            needless.append(event)
    assert not needless, f"nothing went wrong without: {needless}"
