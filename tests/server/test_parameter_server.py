"""Training with parameter servers, from the launcher to the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import allreduce as ar
from tests.harness import ROOT

EXAMPLE = ROOT / "mpi_examples" / "parameter_server.py"

# Fifty updates of 4 shares, on four replicas or by parameter servers; the weights go to a file.
EQUAL = """
import sys
import numpy as np
import allreduce as ar
from tests.server.test_parameter_server import data, model_in

ar.set_seed(3)
if "mirrored" in sys.argv:
    ar.config.set_logical_devices("CPU", 4)
    strategy = ar.MirroredStrategy()
else:
    strategy = ar.ParameterServerStrategy(update="sync", replicas_to_aggregate=4)
model = model_in(strategy)
history = model.fit(*data(), batch_size=24, epochs=5, verbose=0)
if getattr(strategy, "is_chief", True):
    weights = {f"w{i}": each for i, each in enumerate(model.get_weights())}
    np.savez(sys.argv[1], loss=history.history["loss"], **weights)
"""


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return 230 rows: ten batches of 24, the last one of 14."""
    random = np.random.default_rng(0)
    x = random.standard_normal((230, 6)).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int32)


def model_in(strategy: ar.Strategy) -> ar.nn.Sequential:
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(16, activation="relu"), ar.nn.Dense(2)])
        loss = ar.nn.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=ar.optim.Adam(1e-2), loss=loss)
    return model


def launch(cluster: str, *command: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program on a cluster of this machine."""
    launcher = [sys.executable, "-m", "allreduce.run", "--cluster", cluster]
    return subprocess.run(
        [*launcher, "--restarts", str(restarts), *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    ("cluster", "options", "least"),
    [("ps=1,worker=2", (), 0.95), ("ps=2,worker=2", ("--sync",), 0.97)],
)
def test_the_example_learns(cluster: str, options: tuple[str, ...], least: float) -> None:
    result = launch(cluster, str(EXAMPLE), *options)
    found = re.findall(r"\[worker:0\] test accuracy (0\.\d+)", result.stdout)
    assert found, result.stdout + result.stderr
    assert float(found[0]) >= least
    assert result.returncode == 0


def test_synchronous_updates_equal_those_of_mirrored_replicas(tmp_path: Path) -> None:
    program, out, expected = (tmp_path / name for name in ("program.py", "out.npz", "all.npz"))
    program.write_text(EQUAL)
    result = launch("ps=2,worker=2", str(program), str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    command = [sys.executable, str(program), str(expected), "mirrored"]
    subprocess.run(command, check=True, timeout=60, cwd=ROOT, env=_environment())
    found, mirrored = np.load(out), np.load(expected)
    assert found.files == mirrored.files
    for name in found.files:
        np.testing.assert_allclose(found[name], mirrored[name], rtol=1e-4, atol=1e-6)
