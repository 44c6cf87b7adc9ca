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
from tests.strategies.small_models import with_table, words

# Fifty updates of 4 shares, on four replicas or by parameter servers; the weights go to a file.
EQUAL = """
import sys
import numpy as np
import allreduce as ar
from tests.strategies.small_models import data, model_in

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
    ("cluster", "program", "least"),
    [
        ("ps=1,worker=2", ("parameter_server.py",), 0.95),
        ("ps=2,worker=2", ("parameter_server.py", "--sync"), 0.97),
        pytest.param(
            *("ps=2,worker=2", ("embeddings.py",), 0.94), marks=pytest.mark.torture, id="table"
        ),
    ],
)
def test_the_examples_learn(cluster: str, program: tuple[str, ...], least: float) -> None:
    result = launch(cluster, str(ROOT / "mpi_examples" / program[0]), *program[1:])
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


# Tables on two servers, dense variables on the workers.
HYBRID = """
import allreduce as ar
from tests.strategies.small_models import with_table, words

strategy = ar.ParameterServerStrategy(dense="all_reduce", timeout=60)
x, y = words()
model = with_table(strategy, ar.optim.Adagrad(0.1))
history = model.fit(x, y, batch_size=32, epochs=3, verbose=0)
print("losses", *history.history["loss"], model.evaluate(x, y, verbose=0))
"""


def test_dense_variables_may_stay_on_the_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HYBRID)
    result = launch("ps=2,worker=2", str(program))
    assert result.returncode == 0, result.stdout + result.stderr
    x, y = words()
    alone = with_table(None, ar.optim.Adagrad(0.1))
    losses = alone.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    expected = [*losses, alone.evaluate(x, y, verbose=0)]
    found = re.findall(r"losses (.*)", result.stdout)
    assert len(found) == 2
    for each in found:
        np.testing.assert_allclose([float(n) for n in each.split()], expected, rtol=1e-5)


# The chief kills a worker and the server itself, each once, and trains to the end.
KILLS = """
import os, signal, sys, time
import allreduce as ar
from tests.strategies.small_models import data, model_in, pid_of

ar.set_seed(3)
strategy = ar.ParameterServerStrategy(
    update=sys.argv[1], checkpoint=sys.argv[2], checkpoint_every=3, timeout=60
)
model = model_in(strategy)


class Kills(ar.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        victim = {1: "worker:1", 3: "ps:0"}.get(epoch)
        if strategy.is_chief and victim:
            os.kill(pid_of(victim), signal.SIGKILL)


history = model.fit(*data(), batch_size=24, epochs=6, verbose=0, callbacks=[Kills()])
losses = history.history["loss"]
print("losses", len(losses), losses[-1] < losses[0])
"""


@pytest.mark.parametrize("update", [pytest.param("async", marks=pytest.mark.torture), "sync"])
def test_training_survives_the_death_of_a_worker_and_of_the_server(
    tmp_path: Path, update: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(KILLS)
    result = launch("ps=1,worker=2", str(program), update, str(tmp_path / "saved"), restarts=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("losses 6 True") == 2
    assert "others get" in result.stderr or "worker:1 has gone" in result.stderr
    for said in ("/job:ps/task:0 is lost", "is back after a restart", "its checkpoint in"):
        assert said in result.stderr
