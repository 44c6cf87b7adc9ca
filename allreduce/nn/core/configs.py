"""Whether a layer can be made again from the config that it gives, as files need it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from allreduce.errors import UsageError
from allreduce.keywords import NAMED
from allreduce.nn import activations
from allreduce.nn.core.objects import definer, is_ours, misfit

# The options of every layer, and their types.
OPTIONS: Mapping[str, type] = {"name": str, "dtype": str, "trainable": bool}

_REMEDY = "give it a get_config(self) that returns its constructor's arguments, as plain data"


def check(layer: Any, config: Any) -> None:
    """Refuse a config that does not bring its layer back.

    If a class has its own constructor, but inherits `get_config`, the config must contain all
    arguments, also the ones with defaults, because they may have been given. Arguments in `**` are
    assumed to be passed on.

    Args:
        config: The result of its `get_config`.
    """
    kind = type(layer)
    if not isinstance(config, Mapping):
        raise _refusal(layer, f"its get_config returned {config!r:.60} instead of a dict")
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        raise _refusal(layer, f"its config is no plain data ({error})") from None
    if not is_ours(definer(kind, "from_config")) or getattr(kind, "builds_itself", False):
        return  # it may use the config as it likes
    if why := misfit(kind, config, _required_arguments(kind)):
        raise _refusal(layer, f"its constructor {why}")


def _required_arguments(kind: type) -> list[str]:
    """List the arguments that a config must contain: "*factors" for unnamed ones."""
    parameters = inspect.signature(kind).parameters.values()
    names = [each.name for each in parameters if each.kind in NAMED]
    if is_ours(definer(kind, "get_config")) and not arguments(kind):  # else it hands them on
        names += [f"*{each.name}" for each in parameters if each.kind is each.VAR_POSITIONAL]
    return names


def arguments(kind: type) -> list[str]:
    """List what the constructor of a class, or else of its base in this library, takes of its own.

    The options of all layers are left out.
    """
    library = next(each for each in kind.__mro__ if is_ours(each))
    return [name for name in inspect.signature(library).parameters if name not in OPTIONS]


def plain(value: Any) -> Any:
    """Return an argument as plain data: an activation by its name, a tuple as a list."""
    if isinstance(value, tuple):
        return list(value)
    return activations.name_of(value) if callable(value) else value


def given_to(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the options that a class's constructor gets besides its config.

    A class with its own `from_config` gets only its config.
    """
    if not is_ours(definer(kind, "from_config")):
        return {}
    taken = inspect.signature(kind).parameters
    every = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return {name: value for name, value in options.items() if every or name in taken}


def _refusal(layer: Any, why: str) -> UsageError:
    kind = type(layer).__name__
    return UsageError(f"{kind} {layer.path or layer.name!r} cannot be saved: {why}; {_REMEDY}")
