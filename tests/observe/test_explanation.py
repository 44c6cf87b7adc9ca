"""Explanations of a step: where everything is and why, what crosses, what was hidden."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.comm import Work
from allreduce.devices import options
from allreduce.errors import UsageError
from allreduce.graph.core.node import Node
from allreduce.graph.execute import reports
from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.execute.frame import Frame
from allreduce.graph.execute.timing import Clock, StepTiming
from allreduce.graph.update import sharded_update
from allreduce.observe import explanation
from allreduce.reduction import sharding


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())
    monkeypatch.setenv("COLUMNS", "160")


def test_a_step_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ar.MirroredStrategy([f"CPU:{i}" for i in range(4)], devices_per_replica=2)
    with strategy.scope():
        near = ar.Variable(np.ones((3, 3), np.float32), name="m/near")
        with ar.device("CPU:1"):
            far = ar.Variable(np.ones((3, 3), np.float32), name="m/far[bold]x[/y]")
        optimizer = ar.optim.SGD(0.1)

    def step(x: ar.Tensor) -> ar.Tensor:
        with ar.device("CPU:0"):
            h = ar.ops.tanh(x @ near)
        with ar.device("CPU:1"):
            there = h @ far
            turned = ar.ops.transpose(h)  # a view of what was received
        with ar.device("CPU:0"):
            loss = ar.ops.sum(ar.ops.exp(there) + ar.ops.exp(ar.ops.transpose(turned)), axis=1)
        optimizer.minimize(loss, [near, far])
        return loss

    with pytest.raises(UsageError, match=r"has not run .*step as a trace; run it once"):
        ar.observe.explain(strategy, step)
    (batch,) = strategy.distribute_dataset([np.ones((6, 3), np.float32)])
    for _ in range(2):
        strategy.run(step, (batch,))
    ar.observe.explain(strategy, step, tmp_path / "step.svg")
    said = capsys.readouterr().out
    assert said.startswith("replica 0, 3 samples: step 2\nCPU:0 ")
    assert "| m/far[bold]x[/y]".replace("|", "\u2502") in said
    assert "ar.device(/device:CPU:1)" in said
    assert "ar.device('/device:CPU:1')" in said  # of operations
    assert "CPU:0 -> CPU:1: float32(batch, 3), 12 B × batch of tanh" in said
    assert "CPU:1 -> CPU:0: float32(batch, 3), 12 B × batch of matmul" in said
    assert said.count("all_reduce_bucket 0") == 2  # an arena on each device
    for name in ("near", "far[bold]x[/y]"):
        device = "CPU:0" if name == "near" else "CPU:1"
        assert f"bucket 0 of {device} (128 B: m/{name}): ready at " in said
    assert " of its 256 B was hidden behind computation, complete before it waited: " in said
    assert "input: " not in said  # nobody was asked for a batch since the step before
    assert "that are in use at the worst moment" in said
    assert (tmp_path / "step.svg").read_text().startswith("<svg")


def test_a_models_step_that_has_not_run_is_named() -> None:
    strategy = ar.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(3)])
    with pytest.raises(UsageError, match=r"has not run Sequential\.predict_step as a trace; run"):
        ar.observe.explain(strategy, model.predict_step)
    model.compile("sgd", "mse")
    for step, called in ((model.train_step, "train_step"), (model.test_step, "test_step")):
        with pytest.raises(UsageError, match=rf"has not run Model\.{called} as a trace; run"):
            ar.observe.explain(strategy, step)


def _explain_an_update(limit: float | None = None) -> None:
    """Explain a step of two replicas that updates one variable, by gradients of a limited norm."""
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = ar.Variable(np.ones((3, 3), np.float32), name="m/w")
        optimizer = ar.optim.Adam(clip_norm=limit)

    def step(x: ar.Tensor) -> None:
        optimizer.minimize(ar.ops.sum(ar.ops.tanh(x @ w), axis=1), [w])

    (batch,) = strategy.distribute_dataset([np.ones((6, 3), np.float32)])
    strategy.run(step, (batch,))
    ar.observe.explain(strategy, step)


def test_an_update_in_slices_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)
    _explain_an_update()
    said = capsys.readouterr().out
    assert "all_reduce_bucket of the header" in said
    assert "update_slices 0" in said
    assert "the header (64 B: the number of samples): ready at " in said
    assert "\nbucket 0 (64 B: m/w): ready at " in said
    assert "the new parameters" not in said
    assert "\u2502 gradient of the loss " in said  # in the column of parts


def test_sums_and_updates_in_slices_have_names_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)
    _explain_an_update(limit=0.5)
    said = capsys.readouterr().out
    assert said.count("\nbucket 0 (64 B: m/w): ready at ") == 1
    assert said.count("\nthe new parameters of bucket 0 (64 B: m/w): ready at ") == 1
    assert "\nall_reduce_norm" in said


def test_slices_that_are_sent_are_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)
    monkeypatch.setattr(sharded_update, "updates", lambda _: False)  # as over a network
    ar.config.set_shard_everywhere(True)
    _explain_an_update()
    said = capsys.readouterr().out
    for op in ("reduce_scatter_bucket 0", "update_own 0", "all_gather_bucket 0"):
        assert op in said
    assert "\nbucket 0 (64 B: m/w): ready at " in said
    assert "the new parameters of bucket 0 (64 B: m/w): ready at " in said


def _two_buckets() -> tuple[ar.MirroredStrategy, Callable[..., None], BoundProgram]:
    """Take a step with buckets of 16 and 48 KiB, the first with the header's 64 bytes."""
    ar.config.set_buckets(1)  # each variable is one
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = [ar.Variable(np.zeros((64, n), np.float32), name=f"m/{n}") for n in (192, 64)]
        optimizer = ar.optim.SGD(0.1)

    def step(x: Any) -> None:
        wide, square = (x @ each for each in weights)
        loss = ar.ops.sum(wide, axis=1) + ar.ops.sum(ar.ops.tanh(square), axis=1)
        optimizer.minimize(loss, weights)

    (batch,) = strategy.distribute_dataset([np.ones((2, 64), np.float32)])
    strategy.run(step, (batch,))
    latest = strategy.latest(step)
    bound = latest.executors[0].latest if latest else None
    assert bound is not None
    return strategy, step, bound


@pytest.mark.parametrize(
    ("goes_on_in_waits", "early", "said"),
    [
        (True, True, "25% of its 64.1 KiB was hidden behind computation, complete before "),
        (True, False, "0% of its 64.1 KiB was hidden behind computation, complete before "),
        (False, False, "at most 55% of its 64.1 KiB was hidden behind computation\n"),
    ],
)
def test_bytes_weigh_what_was_hidden(
    goes_on_in_waits: bool,
    early: bool,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not goes_on_in_waits:
        monkeypatch.setattr(explanation, "_IN_WAITS", "another one")
    strategy, step, bound = _two_buckets()
    assert bound.timing is not None
    small, large = bound.timing.clocks
    clocks = {
        small: Clock(0.002, 0.012, 0.012, early),  # as long under way as the large one
        large: Clock(0.01, 0.014, 0.02, False),
    }
    bound.timing = bound.communicated = StepTiming(0.0, 0.03, clocks)
    ar.observe.explain(strategy, step)
    told = capsys.readouterr().out
    assert f"communication: the replica waited 6.00 ms of 30.00 ms; {said}" in told
    way = "" if goes_on_in_waits else " under way 10.00 ms at most,"
    assert f"m/192): ready at 10.00 ms of 30.00 ms,{way} waited for 6.00 ms\n" in told


def test_what_another_replica_did_before_a_wait_was_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for = reports.wait_for

    def wait_late(frame: Frame, node: Node, work: Work) -> None:
        """Keep the first replica, until the other one has done its part of the first bucket."""
        end = time.monotonic() + 25
        while frame.replica.id == 0 and len(frame.works) == 1 and not work.settled:
            assert time.monotonic() < end, "nobody does it"
            time.sleep(1e-4)
        wait_for(frame, node, work)

    monkeypatch.setattr("allreduce.graph.execute.reports.wait_for", wait_late)
    _, _, bound = _two_buckets()
    assert bound.timing is not None
    first, last = bound.timing.clocks.values()
    assert first.early
    assert last.early is not None  # it may be done, too, by then


@pytest.mark.parametrize("pipelined", [True, False])
def test_how_much_of_the_input_was_hidden_is_explained(
    pipelined: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ar.config.set_pipelining(pipelined)
    strategy = ar.MirroredStrategy(["CPU:0"])
    step = ar.function(lambda x: ar.ops.sum(x, axis=1))
    for batch in strategy.distribute_dataset([np.ones((4, 3))] * 2):
        strategy.run(step, (batch,))
    ar.observe.explain(strategy, step)
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each[:6] == "input:")
    assert line.startswith("input: the batch took ")
    assert pipelined or line.endswith("; 0% of it was hidden behind other steps")


def test_a_value_that_only_comes_back_is_flagged(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"], devices_per_replica=2)

    def step(x: ar.Tensor) -> ar.Tensor:
        with ar.device("CPU:0"):
            y = ar.ops.exp(x)
        with ar.device("CPU:1"):
            part = y[:, :2]  # a view: cut here, it goes back as it came
        with ar.device("CPU:0"):
            return ar.ops.tanh(part)

    (batch,) = strategy.distribute_dataset([np.ones((6, 3), np.float32)])
    strategy.run(step, (batch,))
    ar.observe.explain(strategy, step)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "NEEDLESS" in line] == [
        "CPU:1 -> CPU:0: float32(batch, 2), 8 B × batch of slice; NEEDLESS: it had come from there"
    ]
