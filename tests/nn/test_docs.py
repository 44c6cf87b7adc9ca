"""docs/nn.md is complete, and its code runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import nn, optim
from allreduce.graph import set_seed
from tests.nn.common import blobs, classifier

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "nn.md").read_text()
NOT_LAYERS = ("Layer", "Model", "Functional", "Sequential", "History")
COMMON = {"self", "name", "dtype", "trainable", "options"}


def _parts() -> dict[str, Any]:
    layers = {
        name: kind
        for name, kind in vars(nn).items()
        if inspect.isclass(kind) and name in nn.__all__ and name not in NOT_LAYERS
    }
    optimizers = {name: kind for name, kind in vars(optim).items() if name in optim.__all__}
    bases = ("Optimizer", "Options")
    known = {name: kind for name, kind in optimizers.items() if inspect.isclass(kind)}
    return {**layers, **{name: kind for name, kind in known.items() if name not in bases}}


@pytest.mark.parametrize("name", _parts())
def test_every_argument_is_in_the_table_with_its_default(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if re.match(rf"\|[^|]*\b{name}`", line))
    for argument in inspect.signature(_parts()[name]).parameters.values():
        if argument.name in COMMON:
            continue
        assert re.search(rf"\b{argument.name}\b", row), argument.name
        written = re.search(rf"\b{argument.name}=([^,| ]+)", row)
        if written:
            value = eval(written[1], {})
            assert value == argument.default, argument.name


def test_every_name_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", PAGE))
    tables = (nn.losses.TABLE, nn.metrics.TABLE, nn.activations.TABLE, nn.initializers.TABLE)
    named = {name for table in tables for name in table}
    named |= {row.kind.__name__ for row in nn.losses.ROWS.values()}
    named |= {kind.__name__ for kind in nn.metrics.CLASSES.values()}
    assert named - words == set()


def _pieces() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pieces = _pieces()
    assert len(pieces) >= 4
    names: dict[str, Any] = {"__name__": "page"}
    for piece in pieces:
        exec(piece, names)
    assert names["shares"].shape == (64, 2)
    assert names["other"][-1] < 1
    assert names["again"].epochs_done == 2
    np.testing.assert_array_equal(names["model"].get_weights()[0], names["values"][0])
    set_seed(0)


@pytest.mark.parametrize("replicas", [2, 4])
def test_clipping_by_the_norm_does_not_depend_on_the_number_of_replicas(replicas: int) -> None:
    (piece,) = (piece for piece in _pieces() if "clip_norm=0.1" in piece)
    x, y = blobs(1003)  # the last batch has a single row

    def losses(replicas: int) -> list[float]:
        set_seed(0)
        strategy = ar.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        with strategy.scope():
            names: dict[str, Any] = {"ar": ar, "model": classifier()}
            exec(piece.partition("\n\n\nother")[0], names)
        batches = [(x[at : at + 334], y[at : at + 334]) for at in range(0, 1003, 334)]
        found = [
            strategy.reduce("mean", strategy.run(names["train_step"], args=batch), axis=0)
            for _ in range(3)
            for batch in strategy.distribute_dataset(batches)
        ]
        strategy.close()
        return found

    np.testing.assert_allclose(losses(replicas), losses(1), rtol=1e-5)
    set_seed(0)
