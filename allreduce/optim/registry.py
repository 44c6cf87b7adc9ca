"""Optimizers by name. A new one is a file and a row; it is imported when it is asked for."""

from __future__ import annotations

import inspect
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
        UsageError: It is none of these, there is no optimizer of that name, or it does not take
            its config.
    """
    if isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        # Without arguments: every optimizer has defaults for all of them.
        return optimizer_class(identifier).from_config({})
    if isinstance(identifier, Mapping) and isinstance(identifier.get("name"), str):
        return _made(optimizer_class(identifier["name"]), identifier.get("config", {}))
    hint = f"; make one: {identifier.__name__}()" if isinstance(identifier, type) else ""
    raise UsageError(f"an optimizer is an Optimizer or a name, not {identifier!r}{hint}")


def _made(kind: type[Optimizer], config: Any) -> Optimizer:
    takes = list(inspect.signature(kind).parameters)
    if not isinstance(config, Mapping):
        raise UsageError(f"{kind.__name__}'s config is a dict of {takes}, not {config!r:.60}")
    unknown = [name for name in config if name not in takes]
    if unknown:
        raise unknown_name(f"argument of {kind.__name__}", unknown[0], takes)
    return kind.from_config(config)


def serialize(optimizer: Optimizer) -> dict[str, Any]:
    """Describe an optimizer as plain data; one's own class as "custom"."""
    kind = type(optimizer)
    row = TABLE.get(kind.__name__.lower())
    key = "name" if row == (kind.__module__, kind.__name__) else "custom"
    return {key: kind.__name__, "config": optimizer.get_config()}


def deserialize(config: Any, custom: Mapping[str, Any]) -> Optimizer:
    """Make the optimizer that `serialize` described, with one's own classes in `custom` by name.

    Raises:
        UsageError: It is neither the library's nor among `custom`.
    """
    if not isinstance(config, Mapping) or "custom" not in config:
        return get(config)
    kind = custom.get(config["custom"])
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        raise UsageError(
            f"unknown optimizer {config['custom']!r}: it is none of the library's; pass its class "
            f"as custom_objects={{{config['custom']!r}: …}}"
        )
    return _made(kind, config.get("config", {}))
