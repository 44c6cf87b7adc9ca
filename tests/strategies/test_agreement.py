"""The same seed and global batch give the same training, however many replicas share the work."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import openblas

SCRIPT = Path(__file__).with_name("steps.py")
# 1,797 = 28 * 64 + 5: with 8 replicas the last batch leaves three of them without any rows.
BATCH = 64

Train = Callable[..., Any]  # (ranks, which, dtype, dropout) -> what steps.py prints


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train in ranks of their own, once for all tests; they do not need to load scikit-learn."""
    from sklearn.datasets import load_digits

    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    digits = load_digits()
    np.savez(path, data=digits.data, target=digits.target)

    @functools.cache
    def run(ranks: int, which: str, dtype: str = "float32", dropout: float = 0.2) -> Any:
        command = [sys.executable, "-m", "allreduce.run", "-n", str(ranks)] if ranks else []
        command += [str(SCRIPT)] if ranks else [sys.executable, str(SCRIPT)]
        arguments = [which, dtype, str(BATCH), str(dropout), str(path)]
        # The launcher chooses these kernels of BLAS for its ranks; NumPy alone would not.
        kernels = {**os.environ, **openblas.choice(os.environ)}
        run = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=100, env=kernels
        )
        assert run.returncode == 0, run.stderr
        line = next(line for line in run.stdout.splitlines() if '"replicas"' in line)
        return json.loads(line[line.index("{") :])

    return run


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        # The 4 are those that are compared with threads, too.
        *[("float32", 4), ("float64", 4)],
        *[pytest.param("float32", ranks, marks=pytest.mark.torture) for ranks in (2, 5, 8)],
        *[pytest.param("float64", ranks, marks=pytest.mark.torture) for ranks in (2, 5, 8)],
    ],
)
def test_losses_do_not_depend_on_the_number_of_ranks(train: Train, ranks: int, dtype: str) -> None:
    alone, together = train(0, "multi", dtype), train(ranks, "multi", dtype)
    assert together["replicas"] == ranks
    np.testing.assert_allclose(together["loss"], alone["loss"], rtol=1e-6)
    np.testing.assert_allclose(together["accuracy"], alone["accuracy"], rtol=1e-3)
    assert len(set(together["weights"])) == 1, "ranks ended with different weights"


def test_threads_and_processes_agree_to_the_bit(train: Train) -> None:
    threads, processes = train(0, "mirrored:4"), train(4, "multi")
    assert threads["replicas"] == processes["replicas"] == 4
    assert threads["equal"], "replicas of one process ended with different weights"
    assert threads["loss"] == processes["loss"]
    assert threads["weights"] == processes["weights"][:1]
    assert threads["predicted"] == processes["predicted"]
