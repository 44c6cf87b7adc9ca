"""Train one model per fold; each is tested on what it has not seen."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.training.programs.library import classes, losses_of, result, start


def main(library: Any) -> dict[str, Any]:
    x, y = classes(150, 6, 3, seed=2)
    losses, note = losses_of(library, 100, 32)
    accuracies = []
    for fold in range(3):
        held_out = np.arange(150) % 3 == fold
        with library.scope():
            model = library.Sequential(
                [library.layers.Input((6,)), library.layers.Dense(3, activation="softmax")]
            )
            start(model, seed=fold)
            model.compile(
                library.optimizers.Adam(0.05),
                "sparse_categorical_crossentropy",
                metrics=["accuracy"],
            )
        model.fit(
            *(x[~held_out], y[~held_out], 32),
            epochs=3,
            shuffle=False,
            callbacks=[note],
            verbose=0,
        )
        accuracies.append(model.evaluate(x[held_out], y[held_out], verbose=0)[1])
    return result(losses, accuracy=np.mean(accuracies))
