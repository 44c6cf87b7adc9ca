"""Training with parameter servers, from the launcher to the end."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import allreduce as ar
from tests.harness import ROOT
from tests.server.clusters import launch
from tests.strategies.parameter_server.small_models import with_table, words

# Fifty updates of 4 shares, on two ranks of two replicas or by parameter servers; the weights go to
# a file.
EQUAL = """
import sys
import numpy as np
import allreduce as ar
from tests.strategies.parameter_server.small_models import data, model_in

ar.set_seed(3)
if "ranks" in sys.argv:
    ar.config.set_logical_devices("CPU", 2)
    strategy = ar.MultiWorkerMirroredStrategy()
    is_chief = strategy.communicator.rank == 0
else:
    strategy = ar.ParameterServerStrategy(update="sync", replicas_to_aggregate=4)
    is_chief = strategy.is_chief
model = model_in(strategy)
history = model.fit(*data(), batch_size=24, epochs=5, verbose=0)
if is_chief:
    weights = {f"w{i}": each for i, each in enumerate(model.get_weights())}
    np.savez(sys.argv[1], loss=history.history["loss"], **weights)
"""


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
    script = ROOT / "mpi_examples" / program[0]
    result = launch(["--cluster", cluster], script, *program[1:])
    found = re.findall(r"\[worker:0\] test accuracy (0\.\d+)", result.stdout)
    assert found, result.stdout + result.stderr
    assert float(found[0]) >= least


def test_synchronous_updates_equal_those_of_multi_worker_mirrored_strategy(tmp_path: Path) -> None:
    program, out, expected = (tmp_path / name for name in ("program.py", "out.npz", "all.npz"))
    program.write_text(EQUAL)
    launch(["--cluster", "ps=2,worker=2"], program, str(out))
    launch(["-n", "2"], program, str(expected), "ranks")
    found, mirrored = np.load(out), np.load(expected)
    assert found.files == mirrored.files
    for name in found.files:
        np.testing.assert_allclose(found[name], mirrored[name], rtol=1e-4, atol=1e-6)


# Tables on two servers, dense variables on the workers.
HYBRID = """
import allreduce as ar
from tests.strategies.parameter_server.small_models import with_table, words

strategy = ar.ParameterServerStrategy(dense="all_reduce", timeout=60)
x, y = words()
model = with_table(strategy, ar.optim.Adagrad(0.1))
history = model.fit(x, y, batch_size=32, epochs=3, verbose=0)
print("losses", *history.history["loss"], model.evaluate(x, y, verbose=0))
"""


def test_dense_variables_may_stay_on_the_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HYBRID)
    result = launch(["--cluster", "ps=2,worker=2"], program)
    x, y = words()
    alone = with_table(None, ar.optim.Adagrad(0.1))
    losses = alone.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    expected = [*losses, alone.evaluate(x, y, verbose=0)]
    found = re.findall(r"losses (.*)", result.stdout)
    assert len(found) == 2
    for each in found:
        np.testing.assert_allclose([float(n) for n in each.split()], expected, rtol=1e-5)
