"""One row per layer: its computation comes back when it is made again from its description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from allreduce import nn
from allreduce.nn.models.registry import LAYERS, deserialize

FEATURES = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(size=(2, 7, 6, 4)).astype(np.float32)
WORDS = np.arange(20).reshape(4, 5) % 9

# By name: makes the layer, and what it is called on. Settings are others than the defaults.
CASES: Mapping[str, tuple[Callable[[], nn.Layer], Any]] = {
    "Activation": (lambda: nn.Activation("tanh"), FEATURES),
    "Add": (lambda: nn.Add(), [FEATURES, FEATURES]),
    "AveragePooling2D": (lambda: nn.AveragePooling2D(3, 2, "same"), IMAGES),
    "BatchNorm": (lambda: nn.BatchNorm(epsilon=0.1, scale=False), FEATURES),
    "Concatenate": (lambda: nn.Concatenate(axis=1), [FEATURES, FEATURES]),
    "Conv2D": (lambda: nn.Conv2D(6, (2, 3), 2, "same", groups=2, activation="relu"), IMAGES),
    "Dense": (lambda: nn.Dense(3, "sigmoid", use_bias=False), FEATURES),
    "Dropout": (lambda: nn.Dropout(0.3), FEATURES),
    "Embedding": (lambda: nn.Embedding(9, 3, embeddings_initializer="ones"), WORDS),
    "Flatten": (lambda: nn.Flatten(), IMAGES),
    "GlobalAveragePooling2D": (lambda: nn.GlobalAveragePooling2D(keepdims=True), IMAGES),
    "Input": (lambda: nn.Input((5, 6)), FEATURES),
    "LayerNorm": (lambda: nn.LayerNorm(epsilon=0.1, center=False), FEATURES),
    "MaxPool2D": (lambda: nn.MaxPool2D(3, 1), IMAGES),
    "MultiHeadAttention": (lambda: nn.MultiHeadAttention(2, 3, causal=True), FEATURES),
    "Reshape": (lambda: nn.Reshape((6, -1)), FEATURES),
}
COMMON = {"name", "dtype", "trainable"}  # kept beside the config


def test_every_layer_has_a_case() -> None:
    models = {name for name, kind in LAYERS.items() if issubclass(kind, nn.Model)}
    assert set(LAYERS) - models == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_made_again_from_its_description(name: str) -> None:
    make, inputs = CASES[name]
    layer = make()
    outputs = np.asarray(layer(inputs))
    again = deserialize(layer.describe(), {})
    again(inputs)
    for new, old in zip(again.variables, layer.variables, strict=True):
        new.assign(old.numpy())
    np.testing.assert_array_equal(np.asarray(again(inputs)), outputs)
    assert type(again) is type(layer)
    assert again.get_config() == layer.get_config()
    assert set(inspect.signature(type(layer)).parameters) - COMMON <= set(layer.get_config())
