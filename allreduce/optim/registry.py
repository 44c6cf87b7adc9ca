"""Optimizers by name. A new one is a file and a row; it is imported when it is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from allreduce.errors import UsageError, unknown_name
from allreduce.keywords import NAMED, make_again
from allreduce.optim import schedules
from allreduce.optim.base import Optimizer
from allreduce.optim.options import NAMES as OPTIONS

# name -> (module, class)
TABLE: Mapping[str, tuple[str, str]] = {
    "adagrad": ("allreduce.optim.adagrad", "Adagrad"),
    "adam": ("allreduce.optim.adam", "Adam"),
    "adamw": ("allreduce.optim.adam", "AdamW"),
    "lamb": ("allreduce.optim.lamb", "Lamb"),
    "lars": ("allreduce.optim.lars", "LARS"),
    "lion": ("allreduce.optim.lion", "Lion"),
    "rmsprop": ("allreduce.optim.rmsprop", "RMSprop"),
    "sgd": ("allreduce.optim.sgd", "SGD"),
}


def optimizer_class(name: str) -> type[Optimizer]:
    """Return an optimizer's class by its name, in any case ("adam", "Adam").

    Raises:
        UsageError: The name is unknown; the message lists the existing ones.
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
        return _made(optimizer_class(identifier["name"]), identifier.get("config", {}), {})
    hint = f"; make one: {identifier.__name__}()" if isinstance(identifier, type) else ""
    raise UsageError(f"an optimizer is an Optimizer or a name, not {identifier!r}{hint}")


def _made(kind: type[Optimizer], config: Any, custom: Mapping[str, Any]) -> Optimizer:
    if not isinstance(config, Mapping):
        takes = [*kind.hyperparameters, *OPTIONS]
        raise UsageError(f"{kind.__name__}'s config is a dict of {takes}, not {config!r:.60}")
    return make_again(
        kind,
        config,
        lambda given: _constructed(kind, given, custom),
        lambda made: serialize(made)["config"],
    )


def _constructed(
    kind: type[Optimizer], config: Mapping[str, Any], custom: Mapping[str, Any]
) -> Optimizer:
    """Construct an optimizer of a config whose schedule and groups are plain data."""
    if isinstance(config.get("learning_rate"), Mapping):
        config = {**config, "learning_rate": schedules.get(config["learning_rate"], custom)}
    groups = config.get("groups")
    if isinstance(groups, Mapping):
        name = groups["function"]
        if name not in custom:
            raise UsageError(
                f"the groups of {kind.__name__} are the function {name!r}; pass it as "
                f"custom_objects={{{name!r}: …}}"
            )
        config = {**config, "groups": custom[name]}
    return kind.from_config(config)


def serialize(optimizer: Optimizer) -> dict[str, Any]:
    """Describe an optimizer as plain data; one's own class as "custom".

    Raises:
        UsageError: It could not be made of that again; names the class and the argument.
    """
    kind, config = type(optimizer), optimizer.get_config()
    function = schedules.function_in(config.get("learning_rate"))
    if function is not None:
        raise UsageError(
            f"{kind.__name__} cannot be saved: its learning rate is the function "
            f"{function!r}; set optimizer.learning_rate to a number or to an "
            "ar.optim.schedules.Schedule, of which a class of your own can be saved, too"
        )
    if "groups" in config:
        config["groups"] = {"function": _name_of_groups(optimizer)}
    wrong = _lack(kind, config)
    if wrong:
        raise UsageError(
            f"{kind.__name__} cannot be saved: {wrong} (its config is {config}); name its "
            "constructor's arguments in hyperparameters = (…), or give the class a "
            "get_config(self) that returns them (save_weights keeps the weights)"
        )
    row = TABLE.get(kind.__name__.lower())
    key = "name" if row == (kind.__module__, kind.__name__) else "custom"
    return {key: kind.__name__, "config": config}


def _name_of_groups(optimizer: Optimizer) -> str:
    """Return the name under which loading finds the function among one's custom objects."""
    name = str(getattr(optimizer.groups, "__name__", "<lambda>"))
    if name == "<lambda>":
        raise UsageError(
            f"{type(optimizer).__name__} cannot be saved: its groups is {optimizer.groups!r}; "
            "define it as a function with a name, and pass that to load_model as "
            "custom_objects={name: function} (save_weights keeps the weights)"
        )
    return name


def _lack(kind: type[Optimizer], config: Mapping[str, Any]) -> str:
    """Return why a class's own constructor cannot be called again with a config, or nothing."""
    if vars(Optimizer)["from_config"] is not inspect.getattr_static(kind, "from_config"):
        return ""  # it may use the config as it likes
    taken = inspect.signature(kind)
    names = [name for name, each in taken.parameters.items() if each.kind in NAMED]
    if any(each.kind is each.VAR_KEYWORD for each in taken.parameters.values()):
        names += kind.hyperparameters  # arguments in ** are assumed to be passed on
    for name in names:
        if name not in config:
            return f"its constructor takes {name!r}, which its config leaves out"
    try:
        taken.bind(**config)
    except TypeError as error:
        return f"its constructor does not take its config ({error})"
    return ""


def deserialize(config: Any, custom: Mapping[str, Any]) -> Optimizer:
    """Make the optimizer that `serialize` described, with one's own classes in `custom` by name.

    Raises:
        UsageError: It is neither the library's nor among `custom`.
    """
    if not isinstance(config, Mapping):
        return get(config)
    if isinstance(config.get("name"), str):
        return _made(optimizer_class(config["name"]), config.get("config", {}), custom)
    if "custom" not in config:
        return get(config)
    kind = custom.get(config["custom"])
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        raise UsageError(
            f"unknown optimizer {config['custom']!r}: it is none of the library's; pass its class "
            f"as custom_objects={{{config['custom']!r}: …}}"
        )
    return _made(kind, config.get("config", {}), custom)
