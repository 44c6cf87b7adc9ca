"""Layers that are not trained: in saved models, and after the first `fit`."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import nn
from allreduce.errors import UsageError
from allreduce.events import logger
from allreduce.nn.models import saving


class Block(nn.Layer):
    """Layers in a list and a dict, one of which is not trained unless it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = [nn.Dense(3), nn.Dense(3)]
        self.heads = {"one": nn.Dense(3, trainable=False)}

    def call(self, x: Any) -> Any:
        for layer in self.body:
            x = layer(x)
        return self.heads["one"](x)


class Tuned(nn.Model):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.last = nn.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(self.block(x))


CUSTOM = {"Tuned": Tuned, "Block": Block}


@pytest.mark.parametrize("inside", [Tuned, lambda: nn.Sequential([Block(), nn.Dense(1)])])
def test_what_is_frozen_inside_comes_back(inside: Any, tmp_path: Path) -> None:
    model = inside()
    model.compile("sgd", "mse")
    block = model.layers[0]
    block.body[0].trainable = False
    block.heads["one"].trainable = True
    model.build((None, 2))
    block.body[1].bias.trainable = False
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model", CUSTOM)
    assert _trained(loaded) == _trained(model)
    assert len(_trained(model)) == 5
    tensors, described = saving.read(tmp_path / "model")
    del described["frozen"]  # as files were before
    saving.write(tmp_path / "old", tensors, described)
    assert len(_trained(nn.load_model(tmp_path / "old", CUSTOM))) == 6
    saving.write(tmp_path / "other", tensors, {**described, "frozen": ["x"]})
    with pytest.raises(UsageError, match="no layer or variable 'x'"):
        nn.load_model(tmp_path / "other", CUSTOM)


def _trained(model: nn.Model) -> list[str]:
    wanted = set(model.trainable_variables)
    return [path for path, variable in model.named_variables().items() if variable in wanted]


class Gain(nn.Layer):
    gain = 2.0

    def call(self, x: Any) -> Any:
        return x * self.gain


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    nn.Sequential([Gain()]).predict(np.ones((1, 1)), verbose=0)  # joins, which sets up logging
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_what_is_frozen_after_fit_waits_for_compile(warnings: pytest.LogCaptureFixture) -> None:
    x = np.ones((8, 2), np.float32)
    model = nn.Sequential([nn.Dense(3), nn.Dense(1)], name="late")
    model.compile("sgd", "mse")

    def fit() -> tuple[bool, int]:
        before = model.get_weights()
        warnings.clear()
        model.fit(x, x[:, :1], verbose=0)
        return bool((before[0] != model.get_weights()[0]).any()), len(warnings.records)

    model.build((None, 2))
    assert fit() == (True, 0)
    model.layers[0].trainable = False
    assert fit() == (True, 1)
    said = "step still trains late/0/bias, late/0/kernel: .* call compile again"
    assert re.search(said, warnings.text)
    assert fit() == (True, 0)
    model.compile("sgd", "mse")
    assert fit() == (False, 0)
    model.layers[0].trainable = True
    assert fit() == (False, 1)
    model.trainable = False
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match="nothing of model 'late' is to be trained"):
        fit()


def test_a_model_of_each_fold_is_no_function_made_anew(warnings: pytest.LogCaptureFixture) -> None:
    for _ in range(6):
        model = nn.Sequential([Gain()])
        model.compile("sgd", "mse")
        model.predict(np.ones((1, 1)), verbose=0)
        del model
        gc.collect()
    assert not warnings.records


def test_what_changes_in_a_layer_waits_for_compile() -> None:
    x = np.ones((4, 1), np.float32)
    model = nn.Sequential([Gain()])

    def measure() -> tuple[float, float]:
        model.compile("sgd", "mse")
        return model.evaluate(x, 0 * x, verbose=0), float(model.predict(x, verbose=0)[0, 0])

    assert measure() == (4.0, 2.0)
    model.layers[0].gain = 3.0  # type: ignore[attr-defined]
    assert measure() == (9.0, 3.0)
