"""Losses and metrics as plain data: by name where they are the library's, or else as one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from allreduce.errors import UsageError, unknown_name

Table = Mapping[str, Callable[..., Any]]


def describe(value: Any, table: Table) -> dict[str, Any]:
    """Describe a function or callable object.

    A function of the same name as one in the table is another one and told apart, as only the
    table's own is found again without `custom_objects`.

    Args:
        value: A function, or an object that is called like one.
        table: The library's functions by name.

    Raises:
        UsageError: It is an object of one's own that does not say how it was made.
    """
    for name, known in table.items():
        if value is known:
            return {"library": name}
    if hasattr(value, "__name__"):
        return {"custom": value.__name__}
    return {"custom": type(value).__name__, "config": config_of(value)}


def config_of(value: Any) -> dict[str, Any]:
    """Give an object's `get_config()`, or its constructor's arguments from attributes of that name.

    Raises:
        UsageError: An argument is no attribute.
    """
    if hasattr(value, "get_config"):
        return dict(value.get_config())
    kind = type(value)
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    taken = [
        name for name, each in inspect.signature(kind).parameters.items() if each.kind in named
    ]
    for name in taken:
        if not hasattr(value, name):
            raise UsageError(
                f"{kind.__name__} cannot be saved: its constructor takes {name!r}, which is not "
                f"kept as self.{name}; keep it, or give the class a get_config(self) that returns "
                "its constructor's arguments"
            )
    return {name: getattr(value, name) for name in taken}


def restore(kind: str, config: Any, table: Table, custom: Mapping[str, Any]) -> Any:
    """Find or make what `describe` described.

    Args:
        kind: What it is, for errors: "loss".
        config: What `describe` gave.
        table: The library's functions by name.
        custom: One's own functions, objects and classes by name.

    Raises:
        UsageError: There is none of that name, or its class does not take its own config.
    """
    if isinstance(config, Mapping) and isinstance(name := config.get("library"), str):
        if name not in table:
            raise unknown_name(kind, name, table)
        return table[name]
    if not isinstance(config, Mapping) or not isinstance(name := config.get("custom"), str):
        raise UsageError(f"the file is damaged: it describes a {kind} as {config!r:.60}")
    if name not in custom:
        raise UsageError(
            f"unknown {kind} {name!r}: it is none of the library's; pass "
            f"custom_objects={{{name!r}: …}}"
        )
    found = custom[name]
    return make(found, config.get("config") or {}) if isinstance(found, type) else found


def make(kind: type, config: Mapping[str, Any]) -> Any:
    """Make an object of its class and config.

    Raises:
        UsageError: The class does not take it.
    """
    try:
        return kind(**config)
    except TypeError as error:
        raise UsageError(
            f"{kind.__name__} cannot be made from its config {dict(config)}: {error}; give it a "
            "get_config(self) that returns its constructor's arguments"
        ) from None
