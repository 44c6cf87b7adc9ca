"""Layers, models, losses and metrics, under Keras's names."""

from typing import TYPE_CHECKING

from allreduce.callbacks.history import History as History
from allreduce.errors import did_you_mean
from allreduce.nn import activations as activations
from allreduce.nn import initializers as initializers
from allreduce.nn import losses as losses
from allreduce.nn import metrics as metrics
from allreduce.nn.core.layer import Layer as Layer
from allreduce.nn.layers.activation import Activation as Activation
from allreduce.nn.layers.attention import MultiHeadAttention as MultiHeadAttention
from allreduce.nn.layers.conv2d import Conv2D as Conv2D
from allreduce.nn.layers.dense import Dense as Dense
from allreduce.nn.layers.dropout import Dropout as Dropout
from allreduce.nn.layers.embedding import Embedding as Embedding
from allreduce.nn.layers.flatten import Flatten as Flatten
from allreduce.nn.layers.input import Input as Input
from allreduce.nn.layers.merging import Add as Add
from allreduce.nn.layers.merging import Concatenate as Concatenate
from allreduce.nn.layers.normalization import BatchNorm as BatchNorm
from allreduce.nn.layers.normalization import LayerNorm as LayerNorm
from allreduce.nn.layers.pooling import AveragePooling2D as AveragePooling2D
from allreduce.nn.layers.pooling import GlobalAveragePooling2D as GlobalAveragePooling2D
from allreduce.nn.layers.pooling import MaxPool2D as MaxPool2D
from allreduce.nn.layers.reshape import Reshape as Reshape
from allreduce.nn.models.functional import Functional as Functional
from allreduce.nn.models.loading import load_model as load_model
from allreduce.nn.models.model import Model as Model
from allreduce.nn.models.registry import LAYERS as _LAYERS
from allreduce.nn.models.sequential import Sequential as Sequential

_PUBLIC = {
    name: each
    for name, each in globals().items()
    if getattr(each, "__module__", "").startswith("allreduce.nn.")
}
_LAYERS.update(
    (name, each)
    for name, each in _PUBLIC.items()
    if isinstance(each, type) and issubclass(each, Layer) and each not in (Layer, Model)
)
__all__ = sorted([*_PUBLIC, "History", "activations", "initializers", "losses", "metrics"])


if not TYPE_CHECKING:  # else type checkers would believe that every name is there

    def __getattr__(name: str) -> object:
        text = f"ar.nn has no {name!r}{did_you_mean(name, __all__)}"
        raise AttributeError(text, name="")  # without it a traceback adds a suggestion of its own


def __dir__() -> list[str]:
    return sorted(__all__)
