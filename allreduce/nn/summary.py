"""The table that `Model.summary` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from allreduce.graph.core.naming import snake_case
from allreduce.graph.core.spec import show

if TYPE_CHECKING:
    from allreduce.nn.layer import Layer


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
