"""Classify images; a generator flips half of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.training.programs.library import losses_of, result, start


def images(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, rows)
    ramp = np.linspace(-1, 1, 8)
    across, along = np.broadcast_to(ramp[:, None], (8, 8)), np.broadcast_to(ramp, (8, 8))
    pictures = np.where(labels[:, None, None] == 1, across, along)
    return (pictures + random.normal(0, 0.3, (rows, 8, 8)))[..., None].astype("float32"), labels


def augmented(x: np.ndarray, y: np.ndarray, size: int) -> Any:
    random = np.random.default_rng(3)
    while True:
        for at in range(0, len(x), size):
            batch = x[at : at + size]
            flip = random.random(len(batch)) < 0.5
            yield (
                np.where(flip[:, None, None, None], batch[:, ::-1, ::-1], batch),
                y[at : at + size],
            )


def main(library: Any) -> dict[str, Any]:
    layers = library.layers
    with library.scope():
        model = library.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(8, 3, padding="same"),
                library.BatchNorm(),
                layers.Activation("relu"),
                layers.MaxPool2D(),
                layers.Flatten(),
                layers.Dense(2, activation="softmax"),
            ]
        )
        start(model)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = images(160, 0)
    losses, note = losses_of(library, 160, 32)
    model.fit(
        augmented(x, y, 32),
        epochs=8,
        steps_per_epoch=5,
        validation_data=images(64, 1),
        callbacks=[note],
        verbose=0,
    )
    loss, accuracy = model.evaluate(*images(64, 1), verbose=0)
    return result(losses, loss=loss, accuracy=accuracy)
