"""Whether a layer can be made again from the config that it gives, as files need it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from allreduce.errors import UsageError

_REMEDY = "give it a get_config(self) that returns its constructor's arguments, as plain data"


def check(layer: Any, config: Any) -> None:
    """Refuse a config that does not bring its layer back.

    A class that has its own constructor, and whose `get_config` is one that knew nothing of it,
    has to say all its arguments, also those with defaults: they may have been given.

    Args:
        layer: What is described.
        config: What `get_config` returned.

    Raises:
        UsageError: It does not; names the class and the argument.
    """
    kind = type(layer)
    if not isinstance(config, Mapping):
        raise _refusal(layer, f"its get_config returned {config!r:.60} instead of a dict")
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        raise _refusal(layer, f"its config is no plain data ({error})") from None
    if not _definer(kind, "from_config").__module__.startswith("allreduce.nn."):
        return  # what it makes of the config is its own affair
    signature = inspect.signature(kind)
    if not issubclass(_definer(kind, "get_config"), _definer(kind, "__init__")):
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        for name, each in signature.parameters.items():
            if each.kind in named and name not in config:
                raise _refusal(
                    layer, f"its constructor takes {name!r}, which get_config leaves out"
                )
    try:
        signature.bind(**config)
    except TypeError as error:
        raise _refusal(layer, f"its constructor does not take its config ({error})") from None


def takes(kind: type, option: str) -> bool:
    """Tell whether a class's constructor has an argument of that name, and is given it by us.

    A class with a `from_config` of its own is given what its config says alone.
    """
    if not _definer(kind, "from_config").__module__.startswith("allreduce.nn."):
        return False
    return option in inspect.signature(kind).parameters


def _definer(kind: type, name: str) -> type:
    return next(each for each in kind.__mro__ if name in vars(each))


def _refusal(layer: Any, why: str) -> UsageError:
    kind = type(layer).__name__
    return UsageError(f"{kind} {layer.path or layer.name!r} cannot be saved: {why}; {_REMEDY}")
