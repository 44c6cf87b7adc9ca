"""Explanations of a step: where everything is and why, what crosses, what was hidden."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.errors import UsageError
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
    assert "CPU:0 -> CPU:1: float32(batch, 3), 12 B × batch of matmul+tanh" in said
    assert "CPU:1 -> CPU:0: float32(batch, 3), 12 B × batch of matmul" in said
    assert said.count("all_reduce_bucket 0") == 2  # an arena on each device
    for name in ("near", "far[bold]x[/y]"):
        device = "CPU:0" if name == "near" else "CPU:1"
        assert f"bucket 0 of {device} (128 B: m/{name}): ready at " in said
    assert "of it was hidden behind computation" in said
    assert "input: " not in said  # nobody was asked for a batch since the step before
    assert "that are in use at the worst moment" in said
    assert (tmp_path / "step.svg").read_text().startswith("<svg")


def test_an_update_in_slices_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = ar.Variable(np.ones((3, 3), np.float32), name="m/w")
        optimizer = ar.optim.Adam()

    def step(x: ar.Tensor) -> None:
        optimizer.minimize(ar.ops.sum(ar.ops.tanh(x @ w), axis=1), [w])

    (batch,) = strategy.distribute_dataset([np.ones((6, 3), np.float32)])
    strategy.run(step, (batch,))
    ar.observe.explain(strategy, step)
    said = capsys.readouterr().out
    assert "all_reduce_bucket of the header" in said
    assert "update_slices 0" in said
    assert "the header (64 B: the number of samples): ready at " in said
    assert "bucket 0 (64 B: m/w): ready at " in said


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
