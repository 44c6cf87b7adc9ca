"""Describe a model: its summary, and the facts that ranks compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from allreduce.errors import UsageError
from allreduce.graph.core.naming import snake_case
from allreduce.graph.core.spec import show
from allreduce.nn import losses, metrics
from allreduce.nn.core.checks import inner_layers
from allreduce.nn.core.layer import Layer
from allreduce.nn.models.steps import Steps


def print_summary(model: Layer) -> None:
    """Print one row per layer directly inside the model: name, output shape, parameters."""
    table = Table(title=f"{type(model).__name__} {model.name!r}", title_justify="left")
    table.add_column("layer")
    table.add_column("output shape")
    table.add_column("params", justify="right")
    for key, layer in model.children():
        shape, kind = layer.output_shape, type(layer).__name__
        named = "" if layer.name == snake_case(kind) else f" {layer.name!r}"
        table.add_row(
            f"{key} ({kind}{named})",
            "?" if shape is None else show(shape) if isinstance(shape, tuple) else str(shape),
            f"{layer.count_params():,}" if layer.built else "?",
        )
    total = model.count_params()
    trained = sum(variable.storage[0].size for variable in model.trainable_variables)
    console = Console()
    console.print(table)
    if model.built:
        console.print(f"parameters: {total:,} ({trained:,} trainable)", highlight=False)
    else:
        console.print("not built yet: call build((None, features)) or fit", highlight=False)


# Omitted from a layer's config: a name may count the layers of one process, and inner layers have
# entries of their own.
_LEFT_OUT = ("name", "layers")


def rank_facts(model: Layer, compiled: Steps | None, what: str) -> dict[str, str]:
    """List the facts of a model that ranks compare: layers, their arguments, and the compilation.

    Args:
        compiled: None if the model is not compiled.
        what: "predict" needs no loss, "evaluate" no optimizer.
    """
    layers = {"the model": model}
    for place, layer in enumerate(inner_layers(model).values()):
        layers[f"layer {place} ({type(layer).__name__})"] = layer
    facts = {"the list of layers": ", ".join(type(layer).__name__ for layer in layers.values())}
    for where, layer in layers.items():
        facts.update({f"{key} of {where}": repr(value) for key, value in _config(layer).items()})
    if compiled is not None and what != "predict":
        facts["the loss"] = _name(compiled.loss)
        facts["the list of metrics"] = _name(compiled.settings.metrics or [])
        facts["the list of weighted metrics"] = _name(compiled.settings.weighted_metrics or [])
        facts["the weights of losses"] = str(compiled.settings.loss_weights)
        if what == "fit":
            settings = compiled.optimizer.get_config().items()
            listed = ", ".join(f"{name}={value!r}" for name, value in settings)
            facts["the optimizer"] = f"{type(compiled.optimizer).__name__}({listed})"
    return facts


def _config(layer: Layer) -> dict[str, Any]:
    try:
        config = layer.get_config()
    except UsageError:  # it holds an object without a name, such as a user's function
        return {}
    return {key: value for key, value in config.items() if key not in _LEFT_OUT}


def _name(loss: Any) -> str:
    """Name a loss or metric, or each in a dict or list of them."""
    if isinstance(loss, str) or loss is None:
        return str(loss)
    if isinstance(loss, Mapping):
        return f"{{{', '.join(f'{key}: {_name(each)}' for key, each in loss.items())}}}"
    if isinstance(loss, list | tuple):
        return f"[{', '.join(map(_name, loss))}]"
    if isinstance(loss, losses.Loss):
        given = ", ".join(f"{key}={value!r}" for key, value in loss.options.items() if value)
        return f"{_name(loss.function)}{f'({given})' if given else ''}"
    if isinstance(loss, metrics.Metric):
        return f"{type(loss).__qualname__}({loss.get_config()})"
    return str(getattr(loss, "__qualname__", type(loss).__qualname__))
