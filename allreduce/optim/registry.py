"""Optimizers by name. A new one is a file and a row; it is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from allreduce.errors import UsageError, unknown_name
from allreduce.optim.base import Optimizer

# name -> (module, class)
TABLE: Mapping[str, tuple[str, str]] = {
    "adam": ("allreduce.optim.adam", "Adam"),
    "sgd": ("allreduce.optim.sgd", "SGD"),
}


def optimizer_class(name: str) -> type[Optimizer]:
    """Return an optimizer's class by its name, in any case ("adam", "Adam").

    Raises:
        UsageError: There is none; the message lists those that exist.
    """
    row = TABLE.get(name.lower())
    if row is None:
        raise unknown_name("optimizer", name, TABLE)
    found: type[Optimizer] = getattr(import_module(row[0]), row[1])
    return found


def get(identifier: Any) -> Optimizer:
    """Make an optimizer of a name or a `{"name", "config"}` description; pass an optimizer through.

    Raises:
        UsageError: It is none of these, or there is no optimizer of that name.
    """
    if isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        # Without arguments: every optimizer has defaults for all of them.
        return optimizer_class(identifier).from_config({})
    if isinstance(identifier, Mapping) and {"name", "config"} <= identifier.keys():
        return optimizer_class(identifier["name"]).from_config(identifier["config"])
    hint = f"; make one: {identifier.__name__}()" if isinstance(identifier, type) else ""
    raise UsageError(f"an optimizer is an Optimizer or a name, not {identifier!r}{hint}")


def serialize(optimizer: Optimizer) -> dict[str, Any]:
    """Describe an optimizer as plain data, for `get`."""
    return {"name": type(optimizer).__name__, "config": optimizer.get_config()}
