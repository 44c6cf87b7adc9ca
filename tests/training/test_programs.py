"""Programs that Keras users write: the same on 1 and 2 ranks, and as in Keras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.harness import ROOT, run_ranks
from tests.training.programs.library import UPDATES

BOTH = (
    *("cosine_with_warmup", "early_stopping", "images_with_augmentation", "imbalanced_classes"),
    *("k_fold", "text_classification", "transfer", "two_inputs_two_outputs"),
)
OURS = ("custom_callback_and_metric", "custom_train_step")
Results = dict[str, Any]


def run_all(names: list[str], which: str) -> None:
    """Run programs one after the other, and print what each gives."""
    import importlib
    import json

    from tests.training.programs import library

    made = getattr(library, which)()
    found = {}
    for name in names:
        made.set_seed(0)
        program = importlib.import_module(f"tests.training.programs.{name}")
        found[name] = program.main(made)
    print(json.dumps(found))


def ran(size: int) -> Results:
    results = run_ranks(run_all, size, arguments=([*BOTH, *OURS], "allreduce_library"), timeout=300)
    for result in results:
        assert result.returncode == 0, result.stderr
    ranks = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    assert all(rank == ranks[0] for rank in ranks)
    return dict(ranks[0])


@pytest.fixture(scope="module")
def alone() -> Results:
    return ran(1)


@pytest.fixture(scope="module")
def on_two_ranks() -> Results:
    return ran(2)


@pytest.fixture(scope="module")
def in_keras() -> Results:
    found = [name for name in ("jax", "torch", "tensorflow") if find_spec(name)]
    if not found or not find_spec("keras"):
        pytest.skip("Keras is not installed, or has no backend that trains")
    code = f"from tests.training.test_programs import *\nrun_all({list(BOTH)!r}, 'keras_library')"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "KERAS_BACKEND": found[0], "PYTHONPATH": path}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert told.returncode == 0, told.stderr
    return dict(json.loads(told.stdout.splitlines()[-1]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*BOTH, *OURS])
def test_two_ranks_do_as_one(name: str, alone: Results, on_two_ranks: Results) -> None:
    one, two = alone[name], on_two_ranks[name]
    assert len(one["losses"]) == len(two["losses"]) == UPDATES  # all make so many
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=0, atol=1e-5)
    for metric, value in one["metrics"].items():
        assert two["metrics"][metric] == pytest.approx(value, abs=0.02)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BOTH)
def test_keras_does_the_same(name: str, alone: Results, in_keras: Results) -> None:
    ours, theirs = alone[name], in_keras[name]
    assert len(ours["losses"]) == len(theirs["losses"])
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=2e-4, atol=1e-4)
    for metric, value in theirs["metrics"].items():
        assert ours["metrics"][metric] == pytest.approx(value, abs=0.02)
