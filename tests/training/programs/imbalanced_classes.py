"""Find a rare class by giving its samples more weight."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.training.programs.library import losses_of, result, start


def main(library: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    y = (random.random(400) < 0.1).astype("int64")
    x = (random.normal(size=(400, 5)) + 1.2 * y[:, None]).astype("float32")
    rare, usual = y.sum(), len(y) - y.sum()
    with library.scope():
        model = library.Sequential(
            [
                library.layers.Input((5,)),
                library.layers.Dense(8, activation="relu"),
                library.layers.Dense(2, activation="softmax"),
            ]
        )
        start(model)
        model.compile(
            library.optimizers.SGD(0.1, momentum=0.9),
            "sparse_categorical_crossentropy",
            weighted_metrics=["accuracy"],
        )
    losses, note = losses_of(library, 400, 40)
    weights = {0: len(y) / (2 * usual), 1: len(y) / (2 * rare)}
    model.fit(
        *(x, y, 40),
        epochs=5,
        shuffle=False,
        class_weight=weights,
        callbacks=[note],
        verbose=0,
    )
    each = np.where(y == 1, weights[1], weights[0])
    loss, accuracy = model.evaluate(x, y, sample_weight=each, verbose=0)
    return result(losses, loss=loss, accuracy=accuracy)
