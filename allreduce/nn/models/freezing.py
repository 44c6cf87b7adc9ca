"""Which parts of a model are not to be trained, in its files and between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from allreduce.errors import UsageError
from allreduce.graph.trace.variable import Variable
from allreduce.nn.core.checks import inner_layers
from allreduce.nn.core.layer import Layer


def frozen(model: Layer) -> list[str]:
    """List the paths below a model of the layers and variables inside it that are not trained."""
    return [path for path, part in _parts(model).items() if not part.trainable]


def restore(model: Layer, paths: Any, file: str | PathLike[str]) -> None:
    """Freeze a built model's parts as `frozen` listed them, and no others.

    Args:
        paths: The paths in the file.
        file: The file's name in errors.
    """
    parts = _parts(model)
    for path in paths:
        if path not in parts:
            raise UsageError(
                f"{file} is of another architecture: model {model.name!r} has no layer or variable "
                f"{path!r}, which is not trained there"
            )
    for path, part in parts.items():
        part.trainable = path not in paths


def _parts(model: Layer) -> Mapping[str, Layer | Variable]:
    return {**inner_layers(model), **model.named_variables()}
