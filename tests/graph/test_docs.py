"""The code of docs/graph.md and docs/devices.md runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = np.ones((6, 4), np.float32)


def _pieces(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Give what the pages take for granted, and put back what they choose."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "_current", options.Options())
    ar.config.set_logical_devices("CPU", 4)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    yield {"ar": ar, "np": np, "strategy": strategy, "__name__": "page"}
    strategy.close()


def test_the_code_about_graphs_runs(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    scans, exchanges, debugging, looking = _pieces("graph.md")
    strategy = names["strategy"]
    exec(scans, names)
    assert names["LastState"]()(np.ones((2, 5, 3), np.float32)).shape == (2, 32)
    with strategy.scope():
        names["encoder"] = ar.nn.Dense(64)
        model = names["model"] = ar.nn.Sequential([ar.nn.Input((4,)), ar.nn.Dense(1)])
    (names["batch"],) = strategy.distribute_dataset([(ROWS,)])
    exec(exchanges, names)
    strategy.run(names["step"], args=names["batch"])
    exec(debugging, names)
    assert ar.config.functions_run_eagerly()
    (both,) = strategy.distribute_dataset([(ROWS, ROWS[:, :1])])
    names["images"], names["labels"] = both
    strategy.run(names["step"], args=both)
    assert "float32(batch, 1): [[" in capsys.readouterr().out, "with its values"
    ar.config.run_functions_eagerly(False)
    names["step"] = ar.function(model.train_step)
    exec(looking, names)
    assert Path("step.svg").read_text().startswith("<svg")
    assert "placeholder" in capsys.readouterr().out


def test_the_code_about_devices_runs(names: dict[str, Any]) -> None:
    known, scopes, several, limits, threads = _pieces("devices.md")
    exec(known, names)
    assert names["strategy"].num_replicas_in_sync == 4
    names.update(x=ROWS, w=ROWS.T)
    exec(scopes, names)
    assert names["y"].device.index == 1
    assert names["bias"].device == names["z"].device
    exec(several, names)
    run, layers = names["strategy"].run, (names["first"], names["second"])
    result = run(lambda x: layers[1](layers[0](x)), args=(ROWS,))
    assert [value.shape for value in result.values] == [(6, 10), (6, 10)]
    exec(threads, names)
    assert ar.config.threading.get_inter_op_parallelism_threads() == 2
    with pytest.raises(ar.UsageError, match="in use already"):  # it comes first in a program
        exec(limits, names)
