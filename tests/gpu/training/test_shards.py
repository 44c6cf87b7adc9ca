"""Uneven and empty shards on GPUs: exact means, as on CPUs; models move between both by files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu import launch

TRAIN = """
import json, sys
import numpy as np
import allreduce as ar

strategy, data, path = eval(sys.argv[1]), sys.argv[2], sys.argv[3]
ar.set_seed(0)
numbers = np.random.default_rng(0)
x = numbers.normal(size=(137, 8)).astype(np.float32)
y = numbers.integers(0, 4, 137).astype(np.int32)
with strategy.scope():
    model = ar.nn.Sequential([
        ar.nn.Dense(16, activation="relu"), ar.nn.Dense(4, activation="softmax")
    ])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
rank = ar.init().rank
if data == "sharded":  # rank 1 has less, and comes to an end earlier
    x, y = (x[:100], y[:100]) if rank == 0 else (x[100:], y[100:])
# The last of the whole batches has one row, so that all replicas but one are empty.
history = model.fit(x, y, batch_size=17, epochs=2, data=data, verbose=0)
found = [value for name in sorted(history.history) for value in history.history[name]]
if data == "same":
    found += [*model.evaluate(x[:1], y[:1]), *np.ravel(model.predict(x[:3])).tolist()]
found += [float(np.abs(each).sum()) for each in model.get_weights()]
if rank == 0:
    model.save(path)
    print(json.dumps([[each.local for each in strategy.devices], found]))
"""
LOAD = """
import json, sys
import numpy as np
import allreduce as ar

ar.set_seed(0)
with eval(sys.argv[1]).scope():
    model = ar.nn.load_model(sys.argv[2])
x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
rows = model.predict(x).tolist()
model.fit(x, np.array([0, 1, 2], np.int32), epochs=2, batch_size=2, verbose=0)
print(json.dumps([rows, model.predict(x).tolist()]))
"""
CPU, GPU = (f'ar.MirroredStrategy(["{name}:0"])' for name in ("CPU", "GPU"))
MANY = "ar.MultiWorkerMirroredStrategy()"


def run(text: str, *arguments: str, ranks: int = 1, gpus: int = 2, **variables: str) -> Any:
    command = [sys.executable, "-c", text, *arguments]
    environment = {**os.environ, "STANDIN_DEVICES": str(gpus), **variables}
    if ranks > 1:
        command = [str(launch.ROOT / ".venv/bin/mpirun"), "-n", str(ranks), *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def on_cpus(folder: Path) -> tuple[Any, str]:
    path = str(folder / "of_cpus.safetensors")
    return run(TRAIN, CPU, "same", path), path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.skipif(launch.has_driver(), reason="needs three GPUs")
def test_ranks_with_two_gpus_and_one_have_exact_means(folder: Path) -> None:
    (_, numbers), _ = on_cpus(folder)
    path = str(folder / "of_ranks.safetensors")
    used, found = run(TRAIN, MANY, "same", path, ranks=2, gpus=3)
    assert used == ["GPU:0", "GPU:1"]
    np.testing.assert_allclose(found, numbers, rtol=2e-4, atol=1e-6)


def test_shards_of_different_lengths_give_all_ranks_their_steps(folder: Path) -> None:
    path = str(folder / "sharded.safetensors")
    _, ours = run(TRAIN, MANY, "sharded", path, ranks=2)
    _, theirs = run(TRAIN, MANY, "sharded", path, ranks=2, CUDA_VISIBLE_DEVICES="")
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6)


def test_a_saved_model_goes_on_elsewhere(folder: Path) -> None:
    """With its weights and the optimizer's slots."""
    _, path = on_cpus(folder)
    here, there = (run(LOAD, strategy, path) for strategy in (CPU, GPU))
    for ours, theirs in zip(there, here, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6)
