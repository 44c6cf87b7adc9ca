"""Layers by the name of their class, to make them again from a file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from allreduce.devices.options import FLOATS
from allreduce.errors import UsageError, unknown_name
from allreduce.keywords import make_again
from allreduce.nn.core import configs
from allreduce.nn.core.layer import Layer

# Class by name: all layers that allreduce/nn/__init__.py imports, which fills it.
LAYERS: dict[str, type[Layer]] = {}


def layer_class(name: str, custom: Mapping[str, Any], own: bool | None = None) -> type[Layer]:
    """Return a layer's class by its name.

    Args:
        custom: One's own classes by name.
        own: Whether it is one of these; None where it is not known, and they come before the
            library's.
    """
    if name in custom and own is not False:
        found = custom[name]
        if isinstance(found, type) and issubclass(found, Layer):
            return found
        raise UsageError(f"custom_objects[{name!r}] is the class of a layer, not {found!r:.60}")
    if own or name not in LAYERS:
        error = unknown_name("layer", name, [*LAYERS, *custom])
        known = f"unknown layer {name!r}: it is none of the library's" if own else error
        raise UsageError(
            f"{known}; a class of your own is passed as custom_objects={{{name!r}: {name}}}"
        )
    return LAYERS[name]


def deserialize(config: Any, custom: Mapping[str, Any]) -> Layer:
    """Make the layer that `Layer.describe` described."""
    parts = (config.get("class"), config.get("config")) if isinstance(config, Mapping) else ()
    if not parts or not isinstance(parts[0], str) or not isinstance(parts[1], Mapping):
        raise UsageError(f'a layer is described by its "class" and "config", not {config!r:.60}')
    kind, settings = layer_class(parts[0], custom, config.get("own")), dict(parts[1])
    options = _checked(parts[0], config.get("options", {}))  # older files have none
    made = _made_with(configs.given_to(kind, options), kind, settings, custom)
    for key, value in options.items():  # those that the constructor does not take
        if getattr(made, key) != value and not (key == "name" and made.path):
            setattr(made, key, value)
    return made


def _made_with(
    options: Mapping[str, Any],
    kind: type[Layer],
    settings: Mapping[str, Any],
    custom: Mapping[str, Any],
) -> Layer:
    """Construct a layer with as many of the options as its constructor's ** stands for."""
    unnamed = {key: value for key, value in options.items() if key != "name"}
    for given in (options, unnamed) if options else ():
        with suppress(TypeError):
            return _made(kind, {**given, **settings}, custom)
    return make_again(
        kind, settings, lambda given: _made(kind, given, custom), lambda made: made.get_config()
    )


def _made(kind: type[Layer], settings: Mapping[str, Any], custom: Mapping[str, Any]) -> Layer:
    if not kind.holds_layers:
        return kind.from_config(settings)
    make = partial(deserialize, custom=custom)
    made: Layer = kind.from_config(settings, make)  # type: ignore[call-arg]
    return made


def _checked(name: str, options: Any) -> Mapping[str, Any]:
    """Refuse options that no layer has."""
    kinds = configs.OPTIONS
    if (
        not isinstance(options, Mapping)
        or not all(isinstance(each, kinds.get(key, ())) for key, each in options.items())
        or options.get("dtype", FLOATS[0]) not in FLOATS
    ):
        raise UsageError(
            f"the file is damaged: it describes the options of layer {name!r} as {options!r:.60}"
        )
    return options
