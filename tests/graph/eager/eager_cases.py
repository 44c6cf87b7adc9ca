"""Networks that are trained eagerly and traced, by one process and by several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import allreduce as ar

X = np.random.default_rng(4).normal(size=(9, 6, 6, 2)).astype(np.float32)
Y = np.random.default_rng(5).integers(0, 3, 9)


def dense() -> list[Any]:
    """Layers that draw, and that are fused in a trace."""
    return [
        ar.nn.Flatten(),
        ar.nn.Dense(8, activation="relu"),
        ar.nn.Dropout(0.3),
        ar.nn.Dense(3, activation="softmax"),
    ]


def images() -> list[Any]:
    """Layers that exchange statistics, and change variables by themselves."""
    return [
        ar.nn.Conv2D(4, 3, activation="relu"),
        ar.nn.BatchNorm(),
        ar.nn.MaxPool2D(2),
        ar.nn.Flatten(),
        ar.nn.BatchNorm(synchronized=True),
        ar.nn.Dense(3, activation="softmax"),
    ]


class Rows(ar.nn.Model):
    """Attention over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ar.nn.MultiHeadAttention(2, 4, dropout=0.1)
        self.norm = ar.nn.LayerNorm()
        self.out = ar.nn.Dense(3, activation="softmax")

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = ar.ops.reshape(inputs, (inputs.shape[0], 6, 12))
        x = self.norm(x + self.attention(x, training=training))
        return self.out(ar.ops.mean(x, axis=1))


NETWORKS: dict[str, Callable[[], Any]] = {
    "dense": lambda: ar.nn.Sequential(dense()),
    "images": lambda: ar.nn.Sequential(images()),
    "attention": Rows,
}


def trained(make: Callable[[], Any], strategy: ar.Strategy, eagerly: bool) -> list[Any]:
    """Train from the same start; returns losses, outputs and weights.

    The second batch of 9 has one row, so that one of two replicas has none.
    """
    ar.set_seed(3)
    with strategy.scope():
        model = make()
        model.compile(ar.optim.Adam(0.01), "sparse_categorical_crossentropy", run_eagerly=eagerly)
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    outputs = model.predict(X, batch_size=8, verbose=0)
    replicas = [copy for variable in model.variables for copy in variable.storage]
    return [np.asarray(history.history["loss"]), outputs, *replicas]
