"""Layers that are not trained: in saved models, and after the first `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allreduce import nn
from allreduce.errors import UsageError
from allreduce.nn import saving


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
    for frozen, said in (
        ("all", "damaged: it describes what"),
        (["x"], "no layer or variable 'x'"),
    ):
        saving.write(tmp_path / "other", tensors, {**described, "frozen": frozen})
        with pytest.raises(UsageError, match=said):
            nn.load_model(tmp_path / "other", CUSTOM)


def _trained(model: nn.Model) -> list[str]:
    wanted = set(model.trainable_variables)
    return [path for path, variable in model.named_variables().items() if variable in wanted]
