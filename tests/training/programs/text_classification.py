"""Tell two kinds of texts apart by their words' numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.training.programs.library import losses_of, result, start


def texts(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, rows)
    words = random.integers(0, 50, (rows, 12)) + 25 * labels[:, None]
    return words, labels


def main(library: Any) -> dict[str, Any]:
    layers = library.layers
    with library.scope():
        model = library.Sequential(
            [
                layers.Input((12,), dtype="int64"),
                layers.Embedding(75, 8),
                layers.Flatten(),
                layers.Dense(16, activation="relu"),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        start(model)
        model.compile(library.optimizers.RMSprop(0.01), "binary_crossentropy", metrics=["accuracy"])
    x, y = texts(300, 0)
    losses, note = losses_of(library, 300, 50)
    model.fit(x, y[:, None], batch_size=50, epochs=6, shuffle=False, callbacks=[note], verbose=0)
    tests, labels = texts(200, 1)
    found = model.predict(tests, verbose=0)[:, 0] > 0.5
    return result(losses, accuracy=(found == labels).mean())
