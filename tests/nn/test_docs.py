"""docs/nn.md is complete, and its code runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import nn, optim
from allreduce.graph import set_seed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "nn.md").read_text()
NOT_LAYERS = ("Layer", "Model", "Sequential", "History")
COMMON = {"self", "name", "dtype", "trainable"}


def _parts() -> dict[str, Any]:
    layers = {
        name: kind
        for name, kind in vars(nn).items()
        if inspect.isclass(kind) and name in nn.__all__ and name not in NOT_LAYERS
    }
    return {**layers, "SGD": optim.SGD, "Adam": optim.Adam}


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
    losses = {name for name in vars(nn.losses) if name.endswith(("Crossentropy", "Error"))}
    named |= {name for name in vars(nn.metrics) if name.endswith("Accuracy")}
    assert (named | losses) - {"ShapeError", "UsageError"} - words == set()


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pieces = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(pieces) >= 4
    names: dict[str, Any] = {"__name__": "page"}
    for piece in pieces:
        exec(piece, names)
    assert names["shares"].shape == (64, 2)
    assert names["other"][-1] < 1
    assert names["again"].epochs_done == 2
    np.testing.assert_array_equal(names["model"].get_weights()[0], names["values"][0])
    set_seed(0)
