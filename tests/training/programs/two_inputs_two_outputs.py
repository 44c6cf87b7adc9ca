"""Predict a price and a kind from numbers and a table; a functional model."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.training.programs.library import losses_of, result, start


def main(library: Any) -> dict[str, Any]:
    layers = library.layers
    random = np.random.default_rng(0)
    size = random.normal(size=(256, 3)).astype("float32")
    place = random.normal(size=(256, 2)).astype("float32")
    price = size.sum(axis=1, keepdims=True) + place[:, :1]
    kind = (place[:, 1] > 0).astype("int64")
    with library.scope():
        first = layers.Input((3,), name="size")
        second = layers.Input((2,), name="place")
        hidden = layers.Concatenate()([layers.Dense(8, activation="tanh")(first), second])
        hidden = layers.Add()([layers.Dense(10, activation="tanh")(hidden), hidden])
        outputs = [
            layers.Dense(1, name="price")(hidden),
            layers.Dense(2, activation="softmax", name="kind")(hidden),
        ]
        model = library.Model([first, second], outputs)
        start(model)
        model.compile(
            library.optimizers.Adam(0.01),
            loss={"price": "mse", "kind": "sparse_categorical_crossentropy"},
            loss_weights={"price": 0.5, "kind": 1.0},
            metrics={"kind": ["accuracy"]},
        )
    losses, note = losses_of(library, 256, 32)
    history = model.fit(
        {"size": size, "place": place},
        {"price": price, "kind": kind},
        batch_size=32,
        epochs=6,
        shuffle=False,
        callbacks=[note],
        verbose=0,
    ).history
    return result(
        losses,
        price=history["price_loss"][-1],
        kind=history["kind_loss"][-1],
        accuracy=history["kind_accuracy"][-1],
    )
