"""Whether a layer can be made again from the config that it gives, as files need it."""

from __future__ import annotations

import dis
import inspect
import json
from collections.abc import Mapping
from itertools import pairwise
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
    """Tell whether a class's constructor takes an option: named, or handed on to its base.

    A class with a `from_config` of its own is given what its config says alone.
    """
    if not _definer(kind, "from_config").__module__.startswith("allreduce.nn."):
        return False
    parameters = inspect.signature(kind).parameters
    if option in parameters:
        return True
    rest = [each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD]
    return bool(rest) and _only_handed_on(kind, rest[0])


def _only_handed_on(kind: type, name: str) -> bool:
    """Tell whether a constructor does nothing with its **name but to pass it on as **name."""
    instructions = list(dis.get_instructions(vars(_definer(kind, "__init__"))["__init__"]))
    uses = [
        following.opname
        for each, following in pairwise(instructions)
        if each.opname.startswith("LOAD_") and name in _names(each.argval)
    ]
    return bool(uses) and all(opname == "DICT_MERGE" for opname in uses)


def _names(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else (argument,)  # a pair loaded at once


def _definer(kind: type, name: str) -> type:
    return next(each for each in kind.__mro__ if name in vars(each))


def _refusal(layer: Any, why: str) -> UsageError:
    kind = type(layer).__name__
    return UsageError(f"{kind} {layer.path or layer.name!r} cannot be saved: {why}; {_REMEDY}")
