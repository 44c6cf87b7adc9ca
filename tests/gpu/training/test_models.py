"""Models of all layers, and the options of optimizers, train on GPUs to the losses of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import allreduce as ar

nn = ar.nn
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 5, 70).astype(np.int32)
IMAGES = RANDOM.standard_normal((70, 8, 8, 3)).astype(np.float32)
WORDS = RANDOM.integers(0, 50, (70, 7)).astype(np.int32)
DEVICES = [("GPU:0",), ("GPU:0", "GPU:1")]


def image_layers() -> list[Any]:
    return [
        nn.Conv2D(8, 3, padding="same", activation="relu"),
        nn.BatchNorm(synchronized=True),
        nn.MaxPool2D(2),
        nn.Conv2D(6, 2, strides=2),
        nn.AveragePooling2D(2, strides=1, padding="same"),
        nn.Flatten(),
        nn.LayerNorm(),
        nn.Dense(5),
    ]


def word_layers() -> list[Any]:
    return [nn.Embedding(50, 12), nn.LayerNorm(), nn.Flatten(), nn.Dropout(0.2), nn.Dense(5)]


def small_layers() -> list[Any]:
    return [nn.Flatten(), nn.Dense(16, activation="gelu"), nn.Dense(5)]


def fitted(
    devices: Sequence[str], layers: Callable[[], list[Any]], x: np.ndarray, optimizer: Any
) -> list[float]:
    """Train two epochs; return losses, predictions and weights."""
    ar.set_seed(0)
    strategy = ar.MirroredStrategy(list(devices))
    with strategy.scope():
        model = nn.Sequential(layers())
        loss = nn.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer(), loss=loss)
    history = model.fit(x, LABELS, batch_size=32, epochs=2, verbose=0)
    found = [*history.history["loss"], *np.ravel(model.predict(x[:3], verbose=0))]
    if model.optimizer.ema_momentum is not None:
        with model.optimizer.averaged(model.trainable_variables):
            found += [float(np.abs(each).sum()) for each in model.get_weights()]
    return [*found, *(float(np.abs(each).sum()) for each in model.get_weights())]


def close(here: Sequence[float], there: Sequence[float]) -> None:
    np.testing.assert_allclose(here, there, rtol=5e-4, atol=2e-5)


@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize(("layers", "x"), [(image_layers, IMAGES), (word_layers, WORDS)])
def test_models_of_images_and_of_words(layers: Any, x: np.ndarray, devices: Any) -> None:
    optimizer = lambda: ar.optim.Adam(1e-3)  # noqa: E731
    close(fitted(devices, layers, x, optimizer), fitted(["CPU:0"], layers, x, optimizer))


OPTIONS: dict[str, Callable[[], Any]] = {
    "Nesterov": lambda: ar.optim.SGD(0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda: ar.optim.RMSprop(1e-3, momentum=0.5, centered=True),
    "Lamb": lambda: ar.optim.Lamb(2e-3),  # updates one variable at a time
    "groups": lambda: ar.optim.AdamW(
        2e-3, groups=lambda path: {"weight_decay": 0.0} if "bias" in path else {}
    ),
    "clip_norm": lambda: ar.optim.SGD(0.1, momentum=0.9, clip_norm=0.5),
    "clip_value": lambda: ar.optim.Adam(1e-3, clip_value=1e-2),
    "ema_momentum": lambda: ar.optim.Lion(1e-3, ema_momentum=0.8),
    "gradient_accumulation": lambda: ar.optim.Adam(1e-3, gradient_accumulation=2, clip_norm=0.5),
    "all at once": lambda: ar.optim.AdamW(
        1e-3,
        groups=lambda path: {"weight_decay": 0.0} if "bias" in path else {},
        clip_value=1e-2,
        ema_momentum=0.8,
    ),
    "schedule": lambda: ar.optim.SGD(ar.optim.schedules.CosineDecay(0.1, 5), momentum=0.9),
}


@cache
def with_option(name: str, devices: tuple[str, ...]) -> list[float]:
    return fitted(devices, small_layers, IMAGES, OPTIONS[name])


@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_optimizers(name: str, devices: Any) -> None:
    close(with_option(name, devices), with_option(name, ("CPU:0",)))


@pytest.fixture
def short() -> Iterator[None]:
    ar.config.set_mixed_precision("bfloat16")
    yield
    ar.config.set_mixed_precision(None)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_mixed_precision(devices: Any) -> None:
    here, there = (fitted(d, image_layers, IMAGES, ar.optim.Adam) for d in (devices, ["CPU:0"]))
    np.testing.assert_allclose(here, there, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("short")
def test_mixed_precision_in_several_buckets() -> None:
    def clipped() -> Any:
        return ar.optim.SGD(0.5, clip_norm=0.1)

    found = []
    for size in (None, 1):
        ar.config.set_buckets(size)
        try:
            found.append(fitted(("GPU:0", "GPU:1"), small_layers, IMAGES, clipped))
        finally:
            ar.config.set_buckets(None)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
