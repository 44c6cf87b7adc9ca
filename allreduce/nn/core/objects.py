"""Losses and metrics as plain data: by name where they are the library's, or else as one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from allreduce.errors import UsageError, unknown_name
from allreduce.keywords import NAMED

Table = Mapping[str, Callable[..., Any]]


def describe(value: Any, table: Table) -> dict[str, Any]:
    """Describe a function or callable object.

    Another function of the same name as one in the table is kept apart, because only the table's is
    found again without `custom_objects`.

    Args:
        value: A function, or an object that is called like one.
        table: The library's functions by name.
    """
    for name, known in table.items():
        if value is known:
            return {"library": name}
    if hasattr(value, "__name__"):
        return {"custom": value.__name__}
    return {"custom": type(value).__name__, "config": config_of(value)}


def config_of(value: Any) -> dict[str, Any]:
    """Return an object's own `get_config()`, or its constructor's arguments from attributes of
    those names.

    A `get_config` inherited from the library does not know the class's constructor.
    """
    kind = type(value)
    try:
        signature = inspect.signature(kind)
    except ValueError:  # of a class in C, such as functools.partial
        raise UsageError(
            f"{value!r:.60} cannot be saved: a {kind.__name__} does not tell how it was made; make "
            "it a function with a name (def), or an object whose class has a get_config(self)"
        ) from None
    own = definer(kind, "get_config")
    if own is not object and not is_ours(own):
        config = dict(value.get_config())
        named = [name for name, each in signature.parameters.items() if each.kind in NAMED]
        if why := misfit(kind, config, named):
            raise _refusal(kind, f"its constructor {why}; give it")
        return config
    for each in signature.parameters.values():
        argument = str(each.replace(annotation=each.empty, default=each.empty))
        why = "whose names are not known;" if each.kind not in NAMED else ""
        if not why and not hasattr(value, each.name):
            why = f"which is not kept as self.{each.name}; keep it, or"
        if why:
            raise _refusal(kind, f"its constructor takes {argument!r}, {why} give the class")
    return {name: getattr(value, name) for name in signature.parameters}


def _refusal(kind: type, why: str) -> UsageError:
    return UsageError(
        f"{kind.__name__} cannot be saved: {why} a get_config(self) that returns its constructor's "
        "arguments"
    )


def misfit(kind: type, config: Mapping[str, Any], required: Iterable[str]) -> str:
    """Say why a class's constructor cannot take a config; nothing if it can.

    Args:
        config: The result of its `get_config`.
        required: The arguments that have to be there, if the class has its own constructor, but
            inherits `get_config`.
    """
    if not issubclass(definer(kind, "get_config"), definer(kind, "__init__")):
        for name in required:
            if name not in config:
                return f"takes {name!r}, which get_config leaves out"
    try:
        inspect.signature(kind).bind(**config)
    except TypeError as error:
        return f"does not take its config ({error})"
    return ""


def definer(kind: type, name: str) -> type:
    """Return the class that defines a method of a class; `object` if none does."""
    return next((each for each in kind.__mro__ if name in vars(each)), object)


def is_ours(kind: type) -> bool:
    """Return whether a class is one of this library's layers, models, losses or metrics."""
    return kind.__module__.startswith("allreduce.nn.")


def restore(kind: str, config: Any, table: Table, custom: Mapping[str, Any]) -> Any:
    """Find or make what `describe` described.

    Args:
        kind: Its kind, for errors: "loss".
        table: The library's functions by name.
        custom: One's own functions, objects and classes by name.
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
    if not callable(found):
        raise UsageError(f"custom_objects[{name!r}] is no {kind}, but {found!r:.60}")
    return make(found, config.get("config") or {}) if isinstance(found, type) else found


def make(kind: type, config: Mapping[str, Any]) -> Any:
    """Make an object of its class and config."""
    try:
        return kind(**config)
    except TypeError as error:
        raise UsageError(
            f"{kind.__name__} cannot be made from its config {dict(config)}: {error}; give it a "
            "get_config(self) that returns its constructor's arguments"
        ) from None
