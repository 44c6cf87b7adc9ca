"""Nothing a program does races with anything else, and each of its events is needed for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.graph.execute import executor
from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.program_facts import ProgramFacts
from allreduce.reduction import sharding
from tests.graph.eager.eager_cases import NETWORKS, trained
from tests.graph.execute.test_inter_op_threads import Split
from tests.graph.schedule.hazards import hazards


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())


def programs_of(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> list[Program]:
    """Collect what replicas run in some steps."""
    found: list[Program] = []

    class Seen(BoundProgram):
        def __init__(self, facts: ProgramFacts, *rest: Any, **named: Any) -> None:
            found.append(facts.program)
            super().__init__(facts, *rest, **named)

    monkeypatch.setattr(executor, "BoundProgram", Seen)
    run()
    return list({id(each): each for each in found}.values())


def _without_one_event(program: Program) -> Iterator[tuple[str, Program]]:
    for index, instruction in enumerate(program.instructions):
        for dropped in instruction.waits:
            waits = tuple(i for i in instruction.waits if i != dropped)
            changed = list(program.instructions)
            changed[index] = replace(instruction, waits=waits)
            told = f"{instruction} without {program.instructions[dropped]}"
            yield told, replace(program, instructions=tuple(changed))


def check_events(programs: list[Program]) -> int:
    """Prove all programs safe, and all their events needed; returns how many events there are."""
    dropped = 0
    for program in programs:
        assert hazards(program) == [], program
        for told, changed in _without_one_event(program):
            dropped += 1
            assert hazards(changed), told
    return dropped


class Recurrent(ar.nn.Model):
    """Goes through the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = ar.nn.Dense(4, "tanh"), ar.nn.Dense(3, "softmax")

    def call(self, inputs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            return self.cell(ar.ops.concatenate([x, h], axis=-1)), None

        rows = ar.ops.transpose(ar.ops.reshape(inputs, (inputs.shape[0], 6, 12)), (1, 0, 2))
        start = ar.ops.zeros((inputs.shape[0], 4), inputs.dtype)
        return self.out(ar.scan(step, start, rows)[0])


@pytest.mark.parametrize("buckets", ["one", "in slices", "many", "many, some in slices"])
@pytest.mark.parametrize("network", [*NETWORKS, "split", "scan"])
def test_training_is_safe_and_waits_for_nothing_else(
    network: str, buckets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sliced = "slices" in buckets
    if sliced:
        monkeypatch.setattr(sharding, "SHARDED_BYTES", 200 if "many" in buckets else 1)
    if "many" in buckets:
        ar.config.set_buckets(64)
    split = network == "split"
    makers: dict[str, Callable[[], Any]] = {**NETWORKS, "split": Split, "scan": Recurrent}
    make = makers[network]
    per_replica = 2 if split else 1
    strategy = ar.MirroredStrategy(
        [f"CPU:{i}" for i in range(2 * per_replica)], devices_per_replica=per_replica
    )
    programs = programs_of(monkeypatch, lambda: trained(make, strategy, eagerly=False))
    assert any(each.blocks for each in programs)
    assert any(not each.blocks for each in programs)  # a replica without samples
    found = [each.node.op for program in programs for each in program.instructions]
    assert ("update_slices" in found) == sliced
    assert check_events(programs) >= 3


@pytest.mark.parametrize("limit", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("sliced", [False, True])
def test_exchanges_and_changes_inside_a_step_are_safe(
    sliced: bool, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sliced:
        monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = ar.Variable(np.ones((4, 4), np.float32))
        counter = ar.Variable(np.zeros((), np.float32), trainable=False)
        first, second = ar.optim.SGD(0.1), ar.optim.Adam(0.1, clip_norm=limit)
        other = ar.Variable(np.ones(4, np.float32))

    def step(x: ar.Tensor) -> Any:
        before = counter * 1.0
        everybodys = ar.all_gather(ar.ops.tanh(x @ weights))
        total = ar.all_reduce(ar.ops.mean(x), op="sum")
        counter.assign(counter + total)
        seen = ar.ops.exp(x) * counter
        loss = ar.ops.mean(everybodys) * ar.ops.sum(seen * other, axis=1)
        first.minimize(loss, [weights])
        second.minimize(loss, [other])
        return before, counter + 0.0, ar.ops.sum(everybodys @ weights)

    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    dataset = strategy.distribute_dataset([(x,)])

    def run() -> None:
        for (batch,) in dataset:
            strategy.run(step, (batch,))

    programs = programs_of(monkeypatch, run)
    found = [each.node.op for program in programs for each in program.instructions]
    assert ("sum_slices" in found) == (sliced and limit is not None)
    assert check_events(programs) >= 4


def test_values_that_are_gone_and_blocks_that_are_in_use_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @ar.function
    def step(x: ar.Tensor) -> ar.Tensor:
        y = ar.ops.exp(x)
        return y @ (y @ x)

    (program,) = programs_of(monkeypatch, lambda: step(np.ones((3, 3), np.float32)))
    assert program.blocks is not None
    first, second = program.blocks[:2]
    shared = replace(first, values=first.values + second.values, last=second.last)
    assert _why(replace(program, blocks=(shared,))) == {"the value is overwritten"}
    late = replace(first, last=first.first)
    assert "it is used after its end" in _why(replace(program, blocks=(late, second)))


def _why(program: Program) -> set[str]:
    return {each.why for each in hazards(program)}
