"""Whether a model's parts belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.replicator import default_replicator
from allreduce.nn.layer import Layer


def same_replicator(model: Layer) -> None:
    """Refuse a model whose layers or variables were made in another scope than itself.

    Raises:
        UsageError: Names the layer or variable, and says what to do.
    """
    for layer in inner_layers(model):
        if layer.replicator is not model.replicator:
            raise UsageError(_elsewhere("layer", layer.path or layer.name, layer, model))
    for variable in model.variables:
        if variable.replicator is not model.replicator:
            raise UsageError(_elsewhere("variable", variable.name, variable, model))


def _elsewhere(kind: str, name: str, part: Any, model: Layer) -> str:
    return (
        f"{kind} {name!r} was made {_scope(part.replicator)}, but its model {model.name!r} "
        f"{_scope(model.replicator)}: make both inside the same `with strategy.scope():`"
    )


def _scope(replicator: Any) -> str:
    if replicator is default_replicator():
        return "outside of any strategy's scope"
    return f"in the scope of {replicator!r}"


def inner_layers(layer: Layer) -> Iterator[Layer]:
    """Go through all layers inside one, at any depth."""
    for _, child in layer.children():
        yield child
        yield from inner_layers(child)


def assign_all(model: Layer, weights: Sequence[Any]) -> None:
    """Change all of a model's variables, or none.

    Raises:
        UsageError: There are more or fewer weights than variables.
        ShapeError: A shape differs; the message names the variable.
    """
    variables = model.variables
    if len(weights) != len(variables):
        raise UsageError(
            f"set_weights: model {model.name!r} has {len(variables)} variables, but "
            f"{len(weights)} weights were given"
        )
    arrays = [np.asarray(weight) for weight in weights]
    for variable, array in zip(variables, arrays, strict=True):
        if variable.shape != array.shape:
            raise ShapeError(
                f"set_weights: variable {variable.name!r} has shape {variable.shape}, but the "
                f"weight given for it {array.shape}"
            )
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array.astype(variable.dtype))
