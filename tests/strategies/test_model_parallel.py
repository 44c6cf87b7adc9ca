"""A model whose layers lie on several devices learns what it learns on one, to the bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import allreduce as ar
from allreduce.graph import Replicator, default_replicator, scope_of

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((50, 12)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 50)


def _train(strategy: Replicator, places: Sequence[str]) -> tuple[list[float], list[np.ndarray]]:
    """Train three layers for two epochs; gives the losses, and the variables of every replica."""
    ar.set_seed(5)
    with scope_of(strategy):
        model = ar.nn.Sequential(name="model")
        with ar.device(places[0]):
            model.add(ar.nn.Dense(16, activation="tanh"))
        with ar.device(places[1]):
            model.add(ar.nn.Sequential([ar.nn.Dense(8), ar.nn.Dropout(0.25)], name="inner"))
        with ar.device(places[2]):
            model.add(ar.nn.Dense(3, activation="softmax"))
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    history = model.fit(IMAGES, LABELS, batch_size=16, epochs=2, verbose=0)
    return history.history["loss"], [each for v in model.variables for each in v.storage]


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_layers_on_two_devices_train_bitwise_as_on_one(replicas: int) -> None:
    results = []
    for places in (("", "", ""), ("CPU:0", "CPU:1", "CPU:0"), ("CPU:1", "CPU:0", "CPU:1")):
        devices = [f"CPU:{i}" for i in range(2 * replicas)]
        strategy = (
            ar.MirroredStrategy(devices, devices_per_replica=2)
            if replicas
            else default_replicator()
        )
        results.append(_train(strategy, places))
        if isinstance(strategy, ar.Strategy):
            strategy.close()
    losses, variables = results[0]
    for others, moved in results[1:]:
        assert others == losses
        for one, other in zip(variables, moved, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_learns_the_same_on_one_device_and_on_two(ranks: int) -> None:
    script = Path(__file__).parents[2] / "mpi_examples" / "model_parallel.py"
    launch = ["-m", "allreduce.run", "-n", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(script), "--epochs", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert f"{ranks} replica{'s' if ranks > 1 else ''}: weights are the same" in result.stdout
    assert result.stdout.count("on CPU:0 and CPU:1 of each replica: test accuracy") == 1
