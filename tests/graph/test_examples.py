"""The programs of mpi_examples/, with little data: safe, and right on streams of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import allreduce as ar
from allreduce.devices import options
from allreduce.graph.execute import executor
from allreduce.graph.schedule.streams import KINDS
from mpi_examples import model_parallel, train
from tests.devices import far
from tests.graph.schedule.test_hazards import check_events, programs_of
from tests.graph.schedule.test_streams import Streamed

ROWS = 21  # the last of three batches has fewer than there are replicas


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())


def _digits() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 17, (ROWS, 64)).astype(float), generator.integers(0, 10, ROWS)


def _train(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Run train.py on four replicas; returns what it saves."""
    images, labels = _digits()
    data = ((images / 16).astype(np.float32), labels.astype(np.int32))
    monkeypatch.setattr(train, "load", lambda: (data[0], data[0][:8], data[1], data[1][:8]))
    monkeypatch.setattr(train, "draw", lambda *_: None)
    choices = ["--epochs", "1", "--batch-size", "9", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["train.py", *choices])
    train.main()
    saved = load_file(folder / "digits.safetensors")  # the optimizer's slots, too
    return {name: value.tobytes() for name, value in saved.items()}


def _model_parallel(monkeypatch: pytest.MonkeyPatch, _: Path, kind: str = "CPU") -> Any:
    """Train the model of model_parallel.py on two devices of two replicas; returns its weights."""
    images, labels = _digits()
    data = SimpleNamespace(data=images, target=labels)
    monkeypatch.setattr(model_parallel, "load_digits", lambda: data)
    monkeypatch.setattr(model_parallel, "HELD_OUT", 8)
    ar.set_seed(0)
    strategy = ar.MultiWorkerMirroredStrategy(devices_per_replica=2)
    model = model_parallel.train(strategy, f"{kind}:1", 1)
    strategy.close()
    return [weights.tobytes() for weights in model.get_weights()]


@pytest.mark.parametrize("run", [_train, _model_parallel], ids=["train", "model_parallel"])
def test_an_example_is_safe_and_gives_the_same_bits_on_streams(
    run: Callable[[pytest.MonkeyPatch, Path], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[Any] = []
    programs = programs_of(monkeypatch, lambda: found.append(run(monkeypatch, tmp_path)))
    assert check_events(programs) >= 3
    monkeypatch.setattr(executor, "BoundProgram", Streamed)
    for poisons in (False, True):
        monkeypatch.setattr(Streamed, "poisons", poisons)
        assert run(monkeypatch, tmp_path) == found[0]


def test_an_example_gives_the_same_bits_on_devices_beside_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = _model_parallel(monkeypatch, tmp_path)
    far.install(monkeypatch)  # which strategies choose, before CPUs
    found: list[Any] = []
    programs = programs_of(
        monkeypatch, lambda: found.append(_model_parallel(monkeypatch, tmp_path, "GPU"))
    )
    assert check_events(programs) >= 9
    streams = {each.stream.kind for program in programs for each in program.instructions}
    assert streams == set(KINDS)
    assert found[0] == wanted
