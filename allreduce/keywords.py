"""Calls that do not fit a signature: name the nearest keyword, or what other libraries call it."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar, cast

from allreduce.errors import (
    AllreduceError,
    UsageError,
    leave_out_library,
    raised_here,
    unknown_name,
)

# The kinds of parameters that can be given by name.
NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_NONE: Mapping[str, str] = {}
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def explain(elsewhere: Mapping[str, str] = _NONE) -> Callable[[F], F]:
    """Decorate a public function so that a call that does not fit raises an error with a remedy.

    A call that fits costs 0.1 µs more. Tracebacks of the library's other errors, and of Ctrl-C, end
    at the last frame of the user's code.

    Args:
        elsewhere: Arguments of other libraries' function of this name, and what to do instead.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            try:
                try:
                    return function(*args, **named)
                except TypeError as error:
                    if raised_here(error):  # the function did not start
                        _refuse_call(function, args, named, elsewhere)
                        leave_out_library(error)
                    raise
            except (KeyboardInterrupt, AllreduceError) as error:
                leave_out_library(error)
                raise

        return cast(F, call)

    return decorate


def _refuse_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    elsewhere: Mapping[str, str],
) -> None:
    what = function.__name__
    if what == "__init__":  # maybe that of a private base of the class that is made
        if not (args and _is_ours(type(args[0]))):
            return  # a user's class: its own constructor's mistake, a TypeError as in any class
        what = type(args[0]).__name__
    parameters = inspect.signature(function).parameters.values()
    taken = [each for each in parameters if not each.name.startswith("_")]  # those are ours
    known = [each.name for each in taken if each.kind in NAMED and each.name != "self"]
    by_name = [f"{each.name}=" for each in taken if each.kind is each.KEYWORD_ONLY]
    if all(each.kind is not each.VAR_KEYWORD for each in taken):
        for name in named:
            if name not in known:
                raise unknown_argument(what, name, known, elsewhere) from None
    if by_name and len(args) > len(taken) - len(by_name):
        text = f"{what} takes {', '.join(by_name)} by name, not by position"
        others = [name for name in known if f"{name}=" not in by_name]
        raise UsageError(
            f"{text}; only {', '.join(others)} by position" if others else text
        ) from None


def unknown_argument(
    what: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]
) -> UsageError:
    """Build the error for a keyword that `what` does not take."""
    if name in elsewhere:
        return UsageError(f"{what} takes no {name}=: {elsewhere[name]}")
    return unknown_name("argument", name, known, what)


def explain_all(module: dict[str, Any], names: Iterable[str]) -> None:
    """Decorate the public functions of a module, by which pickle then finds them."""
    for name in names:
        if callable(module[name]):
            module[name] = explain()(module[name])
            module[name].__module__ = module["__name__"]


class Refusing:
    """A base class of public classes that does for their constructors what `explain` does."""

    _elsewhere: ClassVar[Mapping[str, str]] = _NONE

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and _is_ours(cls):
            cls.__init__ = explain(cls._elsewhere)(cls.__init__)  # type: ignore[method-assign]


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("allreduce.")


def make_again(
    kind: type[T],
    config: Mapping[str, Any],
    construct: Callable[[Mapping[str, Any]], T],
    describe: Callable[[T], Mapping[str, Any]],
) -> T:
    """Make an object of its class and its config.

    A constructor that fixes arguments of its base inherits a config that has these, too. So if it
    does not take the whole config, it gets the arguments that its signature names, and then also
    those that differ in the config of the result.

    Args:
        config: The config, as JSON has it.
        construct: Makes an object of a config.
        describe: Returns the config of an object.

    Raises:
        UsageError: The constructor makes no object of that config.
    """
    try:
        return construct(config)
    except TypeError as error:
        misfit = error
    # Not in the except block: there, Python raises KeyError for an argument that is given twice.
    taken = inspect.signature(kind).parameters
    given = {key: value for key, value in config.items() if key in taken}
    for _ in range(2):
        with suppress(TypeError):
            made = construct(given)
            found = json.loads(json.dumps(describe(made)))
            differ = {key: value for key, value in config.items() if found.get(key) != value}
            if not differ:
                return made
            given |= differ
    raise UsageError(
        f"{kind.__name__} cannot be made from its config {dict(config)}: {misfit}; give it a "
        "get_config(self) that returns its constructor's arguments"
    ) from misfit
