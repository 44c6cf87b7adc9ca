"""The code of docs/training.md runs, on one rank and on two with equal numbers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.harness import ROOT, run_ranks

PAGE = ROOT / "docs" / "training.md"


def run_page(page: str, folder: str) -> None:
    """Run the pieces of the page as one program, and print what they compute."""
    import json
    import os
    import re
    from pathlib import Path

    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "page"}
    for piece in re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL):
        exec(compile(piece, page, "exec"), names)
    history = names["history"].history
    found = [history, float(names["loss"]), float(names["best"]), names["accuracy"].result()]
    weights = [weight.tolist() for weight in names["model"].get_weights()]
    print(json.dumps([*found, weights]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    found = []
    for size in (1, 2):
        folder = tmp_path_factory.mktemp("page")
        results = run_ranks(run_page, size, arguments=(str(PAGE), str(folder)), timeout=120)
        for result in results:
            assert result.returncode == 0, result.stderr
        ranks = [json.loads(result.stdout.splitlines()[-1]) for result in results]
        assert all(rank == ranks[0] for rank in ranks)
        found.append(ranks[0])
        assert {each.name for each in folder.iterdir()} == {"best.safetensors", "log.csv"}
    return found


def test_the_page_learns(runs: list[Any]) -> None:
    history, _, best, accuracy, _ = runs[0]
    assert history["val_accuracy"][-1] > 0.9
    assert best < 0.2
    assert accuracy > 0.9


def test_two_ranks_compute_what_one_does(runs: list[Any]) -> None:
    (history, loss, best, *_), (history_2, loss_2, best_2, *_) = runs
    for name, values in history.items():
        np.testing.assert_allclose(history_2[name], values, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose([loss_2, best_2], [loss, best], rtol=1e-2, atol=1e-3)


def test_each_piece_is_run() -> None:
    text = PAGE.read_text()
    assert len(re.findall(r"```python\n", text)) == text.count("```") // 2
