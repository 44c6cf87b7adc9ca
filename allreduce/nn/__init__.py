"""Layers, models, losses and metrics, under Keras's names."""

from typing import TYPE_CHECKING

from allreduce.callbacks.history import History
from allreduce.errors import did_you_mean
from allreduce.nn import activations, initializers, losses, metrics
from allreduce.nn.activations import Activation
from allreduce.nn.core.layer import Layer
from allreduce.nn.layers.attention import MultiHeadAttention
from allreduce.nn.layers.conv2d import Conv2D
from allreduce.nn.layers.dense import Dense
from allreduce.nn.layers.dropout import Dropout
from allreduce.nn.layers.embedding import Embedding
from allreduce.nn.layers.flatten import Flatten
from allreduce.nn.layers.input import Input
from allreduce.nn.layers.merging import Add, Concatenate
from allreduce.nn.layers.normalization import BatchNorm, LayerNorm
from allreduce.nn.layers.pooling import AveragePooling2D, GlobalAveragePooling2D, MaxPool2D
from allreduce.nn.layers.reshape import Reshape
from allreduce.nn.models.functional import Functional
from allreduce.nn.models.loading import load_model
from allreduce.nn.models.model import Model
from allreduce.nn.models.sequential import Sequential

__all__ = [
    "Activation",
    "Add",
    "AveragePooling2D",
    "BatchNorm",
    "Concatenate",
    "Conv2D",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "Functional",
    "GlobalAveragePooling2D",
    "History",
    "Input",
    "Layer",
    "LayerNorm",
    "MaxPool2D",
    "Model",
    "MultiHeadAttention",
    "Reshape",
    "Sequential",
    "activations",
    "initializers",
    "load_model",
    "losses",
    "metrics",
]


if not TYPE_CHECKING:  # else type checkers would believe that every name is there

    def __getattr__(name: str) -> object:
        text = f"ar.nn has no {name!r}{did_you_mean(name, __all__)}"
        raise AttributeError(text, name="")  # without it a traceback adds a suggestion of its own


def __dir__() -> list[str]:
    return sorted(__all__)
