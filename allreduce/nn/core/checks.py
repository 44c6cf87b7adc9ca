"""Whether a model's parts belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.array.windows import PADDINGS
from allreduce.graph.replicate.owner import default_replicator
from allreduce.graph.trace.trace import Trace
from allreduce.graph.trace.variable import Variable
from allreduce.nn.core.layer import Layer


def same_replicator(model: Layer) -> None:
    """Refuse a model whose layers or variables were made in another scope than itself."""
    for layer in inner_layers(model).values():
        if layer.replicator is not model.replicator:
            raise UsageError(_elsewhere("layer", layer.path or layer.name, layer, model))
    for variable in model.variables:
        if variable.replicator is not model.replicator:
            raise UsageError(_elsewhere("variable", variable.name, variable, model))


def _elsewhere(kind: str, name: str, part: Any, model: Layer) -> str:
    where = _scope(model.replicator)
    if where == _scope(part.replicator):  # two strategies of one kind
        where = where.replace("of ", "of another ", 1)
    return (
        f"{kind} {name!r} was made {_scope(part.replicator)}, but its model {model.name!r} "
        f"{where}: make both inside the same `with strategy.scope():`"
    )


def _scope(replicator: Any) -> str:
    if replicator is default_replicator():
        return "outside of any strategy's scope"
    return f"in the scope of {replicator!r}"


def check_features(layer: Layer, inputs: Tensor, expected: int) -> None:
    """Refuse inputs whose last axis differs from the one that the variables were made for."""
    if not inputs.ndim or inputs.shape[-1] != expected:
        raise ShapeError(
            f"{users_line()}: layer {layer.path or layer.name!r} takes inputs of shape "
            f"(…, {expected}), but got {show(inputs.shape)}"
        )


def known_padding(layer: str, padding: Any) -> str:
    """Read the name of a padding."""
    if not isinstance(padding, str) or padding not in PADDINGS:
        raise UsageError(f"{layer} takes padding {' or '.join(map(repr, PADDINGS))}: {padding!r}")
    return padding


def class_numbers(model: Layer, labels: np.ndarray, name: str) -> None:
    """Refuse labels that are none of a model's classes, before a step meets them."""
    outputs = model.output_shape
    classes = outputs[-1] if isinstance(outputs, tuple) and outputs else None
    if not isinstance(classes, int):
        return
    wrong = (labels < 0) | (labels >= classes)
    if labels.dtype.kind == "f":
        wrong |= labels != np.floor(labels)
    if wrong.any():
        raise UsageError(
            f"label {labels[wrong][0]} in row {_first_row(wrong)} of {name} is no class: the model "
            f"has {classes} outputs, so that labels are whole numbers from 0 to {classes - 1}"
        )


# (layer, index of the step's input, rows of the layer's table)
Lookups = tuple[tuple[str, int, int], ...]


def tables(trace: Trace) -> Lookups:
    """Find where a step's inputs are looked up as they are."""
    found = []
    for node in trace.nodes:
        if node.op == "lookup_rows" and node.inputs[1] in trace.inputs:
            place = trace.inputs.index(node.inputs[1])
            found.append((node.part, place, node.attrs["table"].rows))
        if node.op == "take" and not node.attrs["wrap"] and node.inputs[1] in trace.inputs:
            rows = trace.nodes[node.inputs[0]].spec.shape[0]
            if isinstance(rows, int):
                found.append((node.part, trace.inputs.index(node.inputs[1]), rows))
    return tuple(found)


def known_numbers(lookups: Lookups, named: Mapping[str, np.ndarray]) -> None:
    """Refuse numbers that an Embedding has no vectors for, before a step meets them.

    Args:
        lookups: What `tables` found.
        named: The step's inputs by what errors call them: whole arrays.
    """
    names = list(named)
    for layer, index, rows in lookups:
        name = names[index]
        samples = named[name]
        wrong = (samples < 0) | (samples >= rows)
        if wrong.any():
            raise UsageError(
                f"number {samples[wrong][0]} in row {_first_row(wrong)} of {name} is out of range: "
                f"layer {layer!r} has vectors for whole numbers from 0 to {rows - 1}"
            )


def _first_row(wrong: np.ndarray) -> int:
    return int(wrong.reshape(len(wrong), -1).any(axis=1).argmax())


def inner_layers(layer: Layer) -> dict[str, Layer]:
    """Return all layers inside one, at any depth, by their path below it: "1/inner/0".

    One that is there twice stands where it comes first.
    """
    found: dict[str, Layer] = {}
    _find_layers(layer, "", {layer}, found)
    return found


def _find_layers(layer: Layer, prefix: str, seen: set[Layer], found: dict[str, Layer]) -> None:
    for key, child in layer.children():
        if child not in seen:
            seen.add(child)
            found[prefix + key] = child
            _find_layers(child, f"{prefix}{key}/", seen, found)


def assign_all(model: Layer, weights: Any, what: str) -> None:
    """Change all of a model's variables, or none; `what` begins the errors."""
    variables = model.variables
    if not isinstance(weights, Iterable):
        raise UsageError(f"{what} takes a list of arrays, one per variable, not {weights!r:.60}")
    weights = list(weights)
    if len(weights) != len(variables):
        raise UsageError(
            f"{what}: model {model.name!r} has {len(variables)} variables, but "
            f"{len(weights)} weights were given"
        )
    values = [_converted(*pair, what) for pair in zip(variables, weights, strict=True)]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _converted(variable: Variable, weight: Any, what: str) -> np.ndarray:
    """Cast a value to a variable's dtype, between floats or integers of different sizes too."""
    try:
        array = np.asarray(weight)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what}: the weight for variable {variable.name!r} is no array: {error}"
        ) from None
    if variable.shape != array.shape:
        raise ShapeError(
            f"{what}: variable {variable.name!r} has shape {variable.shape}, but the weight given "
            f"for it {array.shape}"
        )
    if array.dtype.kind not in "biuf" or not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise UsageError(
            f"{what}: variable {variable.name!r} holds {variable.dtype}, but the value given for "
            f"it {array.dtype}"
        )
    return array.astype(variable.dtype)
