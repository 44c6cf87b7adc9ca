"""Train a head on a frozen base, then both with a small rate."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.training.programs.library import classes, losses_of, result, start


def main(library: Any) -> dict[str, Any]:
    layers = library.layers
    x, y = classes(240, 10, 3)
    with library.scope():
        base = library.Sequential(
            [layers.Input((10,)), layers.Dense(16, activation="tanh"), layers.Dense(8)]
        )
        base.trainable = False
        head = layers.Dense(3, activation="softmax")
        inputs = layers.Input((10,))
        model = library.Model(inputs, head(base(inputs)))
        start(model)
        model.compile(library.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
    before = [np.asarray(weight) for weight in base.get_weights()]
    losses, note = losses_of(library, 240, 24)
    common = {"batch_size": 24, "shuffle": False, "callbacks": [note], "verbose": 0}
    model.fit(x, y, epochs=1, **common)
    kept = all(
        np.array_equal(one, other) for one, other in zip(before, base.get_weights(), strict=True)
    )
    base.trainable = True
    with library.scope():
        model.compile(
            library.optimizers.Adam(0.005), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    model.fit(x, y, epochs=3, **common)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    return result(losses, kept=kept, loss=loss, accuracy=accuracy)
