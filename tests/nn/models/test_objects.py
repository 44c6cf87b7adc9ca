"""Losses, metrics, optimizers and layers of one's own: saved models bring them back."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import nn, optim
from allreduce.errors import UsageError
from allreduce.graph import ops


def absolute(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.absolute(y_pred - y_true), axis=-1)


class Huber(nn.losses.Loss):
    def __init__(self, delta: float = 1.0) -> None:
        super().__init__(absolute)
        self.delta = delta

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return ops.clip(absolute(y_true, y_pred), 0, self.delta)


class Forgets(nn.losses.Loss):
    def __init__(self, factor: float) -> None:
        super().__init__(absolute)


class Weighted(nn.losses.SparseCategoricalCrossentropy):
    def __init__(self, weight: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self._weight = weight

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return self._weight * super().__call__(y_true, y_pred)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "weight": self._weight}


class Share(nn.metrics.Accuracy):
    def __init__(self, of: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self._of = of

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return super().__call__(y_true, y_pred) / self._of

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "of": self._of}


class Silent(Weighted):
    def __init__(self, power: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.power = power


class Unfit(Huber):
    def get_config(self) -> dict[str, Any]:
        return super().get_config()  # which its constructor does not take


class Slow(optim.SGD):
    """An optimizer of one's own."""


def _compiled(loss: Any, metrics: Any = None, optimizer: Any = "sgd") -> nn.Sequential:
    model = nn.Sequential([nn.Input((3,)), nn.Dense(2)])
    model.compile(optimizer, loss, metrics)
    return model


def _again(model: nn.Sequential, path: Path, custom: Any = None) -> None:
    """Save and load a model, and see that it measures the same."""
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    y = np.zeros(20, int) if "sparse" in str(model._steps().loss) else x[:, :2]
    model.save(path)
    loaded = nn.load_model(path, custom)
    measured = [m.evaluate(x, y, verbose=0, return_dict=True) for m in (model, loaded)]
    assert measured[0] == measured[1]


def test_a_function_that_is_called_like_the_librarys_is_not_the_librarys(tmp_path: Path) -> None:
    def mse(y_true: Any, y_pred: Any) -> Any:
        return 100 * nn.losses.mse(y_true, y_pred)

    model = _compiled(mse, [mse])
    with pytest.raises(UsageError, match=r"none of the library's.*custom_objects=\{'mse'"):
        _again(model, tmp_path / "own")
    _again(model, tmp_path / "own", {"mse": mse})
    _again(_compiled("mse", ["mse"]), tmp_path / "library", {"mse": mse})


@pytest.mark.parametrize("from_logits", [False, True])
def test_loss_objects_come_back_with_their_options(tmp_path: Path, from_logits: bool) -> None:
    loss = nn.losses.SparseCategoricalCrossentropy(from_logits)
    metric = nn.losses.SparseCategoricalCrossentropy(not from_logits, name="other")
    _again(_compiled(loss, [metric, "accuracy"]), tmp_path / "model")
    own = nn.losses.Loss(
        lambda y, p, from_logits: (1 + from_logits) * absolute(y, p), from_logits=from_logits
    )
    _again(_compiled(own), tmp_path / "own", {"<lambda>": own.function})


def test_losses_of_ones_own_class_are_made_as_they_were(tmp_path: Path) -> None:
    _again(_compiled(Huber(0.01), [Huber(0.5)]), tmp_path / "huber", {"Huber": Huber})
    custom = {"Weighted": Weighted, "Share": Share}
    sparse = _compiled(Weighted(3.0, from_logits=True), [Share(0.5, name="share")])
    _again(sparse, tmp_path / "sparse", custom)
    squares = nn.losses.MeanSquaredError(name="squares")
    assert type(squares)(**squares.get_config()).name == "squares"
    with pytest.raises(
        UsageError, match=r"Silent cannot be saved: .* takes 'power', which get_con"
    ):
        _compiled(Silent(2.0)).save(tmp_path / "silent")
    with pytest.raises(UsageError, match="Unfit cannot be saved: its constructor does not take"):
        _compiled(Unfit(2.0)).save(tmp_path / "unfit")
    with pytest.raises(UsageError, match=r"takes 'factor', which is not kept as self\.factor"):
        _compiled(Forgets(2.0)).save(tmp_path / "forgets")
    halved = functools.partial(absolute)
    with pytest.raises(UsageError, match="cannot be saved: a partial does not tell how it was"):
        _compiled(halved).save(tmp_path / "partial")


class Warm(optim.SGD):
    def __init__(self, warmup: int = 3, **others: Any) -> None:
        super().__init__(**others)
        self.warmup = warmup


class Half(Warm):
    def get_config(self) -> dict[str, Any]:
        return {"warmup": self.warmup}


class Fixed(optim.SGD):
    def __init__(self) -> None:
        super().__init__(0.5)


def test_optimizers_that_could_not_be_made_again_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"Warm cannot be saved: .* takes 'warmup', which its config"
    ):
        _compiled("mse", optimizer=Warm()).save(tmp_path / "warm")
    with pytest.raises(UsageError, match=r"Half cannot be saved: .* takes 'learning_rate', which"):
        _compiled("mse", optimizer=Half(learning_rate=0.5)).save(tmp_path / "half")
    with pytest.raises(UsageError, match=r"Fixed cannot be saved: .*unexpected keyword argument"):
        _compiled("mse", optimizer=Fixed()).save(tmp_path / "fixed")


def test_custom_objects_of_another_kind_are_named(tmp_path: Path) -> None:
    own_dense = type("Dense", (nn.Dense,), {"__module__": __name__})
    model = nn.Sequential([nn.Input((3,)), own_dense(2)])
    model.compile("sgd", absolute)
    model.save(tmp_path / "model")
    both = nn.Sequential([nn.Input((3,)), own_dense(2), nn.Dense(2)])
    both.save(tmp_path / "both")
    loaded = nn.load_model(tmp_path / "both", {"Dense": own_dense})
    assert [type(layer) for layer in loaded.layers] == [own_dense, nn.Dense]
    for custom, said in (
        ([own_dense], "custom_objects is a dict of classes by name"),
        (
            {"Dense": own_dense(2), "absolute": absolute},
            r"\['Dense'\] is the class of a layer, not <",
        ),
        ({"Dense": own_dense, "absolute": 3}, r"custom_objects\['absolute'\] is no loss, but 3"),
    ):
        with pytest.raises(UsageError, match=said):
            nn.load_model(tmp_path / "model", custom)  # type: ignore[arg-type]


def test_classes_of_ones_own_are_not_mistaken_for_the_librarys(tmp_path: Path) -> None:
    model = _compiled("mse", optimizer=Slow(0.5))
    with pytest.raises(UsageError, match="unknown optimizer 'Slow'"):
        _again(model, tmp_path / "slow")
    _again(model, tmp_path / "slow", {"Slow": Slow})
    assert type(nn.load_model(tmp_path / "slow", {"Slow": Slow}).optimizer) is Slow
    own_dense = type("Dense", (nn.Dense,), {"__module__": __name__})
    model = nn.Sequential([nn.Input((3,)), own_dense(2)])
    model.save(tmp_path / "dense")
    with pytest.raises(UsageError, match="unknown layer 'Dense': it is none of the library's"):
        nn.load_model(tmp_path / "dense")
    loaded = nn.load_model(tmp_path / "dense", {"Dense": own_dense})
    assert type(loaded.layers[0]) is own_dense
