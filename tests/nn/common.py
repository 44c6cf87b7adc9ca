"""Small models and data that tests of nn and training share."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce import nn, optim
from allreduce.graph import set_seed


def blobs(rows: int = 90, features: int = 6, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Make samples around one centre per class: (rows, features) float32, and labels (rows,)."""
    random = np.random.default_rng(5)
    labels = random.integers(0, classes, rows)
    centres = random.normal(size=(classes, features)) * 2
    samples = centres[labels] + random.normal(size=(rows, features))
    return samples.astype(np.float32), labels


def classifier(dtype: str = "float32", dropout: float = 0.0, seed: int = 1) -> nn.Sequential:
    """Make a compiled MLP for `blobs`, with the same initial values for the same seed."""
    set_seed(seed)
    layers: list[Any] = [nn.Dense(16, activation="tanh", dtype=dtype)]
    layers += [nn.Dropout(dropout, dtype=dtype)] if dropout else []
    layers += [nn.Dense(3, activation="softmax", dtype=dtype)]
    model = nn.Sequential(layers, dtype=dtype)
    model.compile(
        optimizer=optim.Adam(0.01), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model
