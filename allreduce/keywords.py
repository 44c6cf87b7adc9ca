"""Calls that do not fit a signature: name the nearest keyword, or what other libraries call it."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar, cast

from allreduce.errors import UsageError, leave_out_library, unknown_name

# The kinds of parameters that can be given by name.
NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_NONE: Mapping[str, str] = {}
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def explain(elsewhere: Mapping[str, str] = _NONE) -> Callable[[F], F]:
    """Decorate a public function so that a call that does not fit raises an error with a remedy.

    A call that fits costs 0.1 µs more. Tracebacks of other mistakes end at the call.

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
                    trace = error.__traceback__
                    if trace is not None and trace.tb_next is None:  # the function did not start
                        _refuse_call(function, args, named, elsewhere)
                    raise
            except UsageError as error:
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
    parameters = inspect.signature(function).parameters
    refuse(function, named, elsewhere)
    places = [each for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places) < len(parameters):
        raise by_name_only(function) from None


def by_name_only(function: Callable[..., Any]) -> UsageError:
    """Build the error for an argument by position that a function takes by name."""
    taken = inspect.signature(function).parameters.values()
    names = [f"{each.name}=" for each in taken if each.kind is each.KEYWORD_ONLY]
    return UsageError(f"{function.__name__} takes {', '.join(names)} by name, not by position")


def refuse(
    takes: Callable[..., Any], named: Mapping[str, Any], elsewhere: Mapping[str, str] = _NONE
) -> None:
    """Refuse keywords that a function or class does not take.

    Args:
        named: The keywords of a call; those that it takes may be among them.
        elsewhere: Arguments of other libraries, and what to do instead.

    Raises:
        UsageError: There is one; the message says what to do instead, or suggests the nearest.
    """
    known = inspect.signature(takes).parameters.values()
    names = [each.name for each in known if each.kind in NAMED and each.name != "self"]
    for name in named:
        if name not in names:
            raise unknown_argument(takes.__name__, name, names, elsewhere) from None


def unknown_argument(
    what: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]
) -> UsageError:
    """Build the error for a keyword that `what` does not take; see `refuse`."""
    if name in elsewhere:
        return UsageError(f"{what} takes no {name}=: {elsewhere[name]}")
    return unknown_name("argument", name, known, what)


class Refusing:
    """A base class of public classes that checks keywords before the constructor.

    It is a class of its own so that `inspect.signature` finds the subclass's `__init__`. Classes
    outside of this library are not checked.
    """

    _elsewhere: ClassVar[Mapping[str, str]] = _NONE

    def __new__(cls, *_: Any, **named: Any) -> Any:
        refuse_of_class(cls, named, cls._elsewhere)
        return super().__new__(cls)


def refuse_of_class(kind: type, named: Mapping[str, Any], elsewhere: Mapping[str, str]) -> None:
    """Refuse keywords that a class of this library does not take, unless it hands them on."""
    if named and kind.__module__.startswith("allreduce."):
        known = inspect.signature(kind).parameters.values()
        if all(each.kind is not each.VAR_KEYWORD for each in known):
            refuse(kind, named, elsewhere)


def made_without_fixed(
    kind: type[T],
    config: Mapping[str, Any],
    make: Callable[[Mapping[str, Any]], T],
    describe: Callable[[T], Mapping[str, Any]],
) -> T | None:
    """Make an object of a class whose constructor fixes some arguments of its base's.

    An inherited config has these, too. Of the arguments that a constructor only passes on, it gets
    those that differ without.

    Args:
        config: The config of the object, as JSON has it.
        make: Makes an object of a config.
        describe: Returns the config of an object.

    Returns:
        An object of that config; None if the constructor makes none.
    """
    taken = inspect.signature(kind).parameters
    given = {key: value for key, value in config.items() if key in taken}
    for _ in range(2):
        with suppress(TypeError):
            made = make(given)
            found = json.loads(json.dumps(describe(made)))
            differ = {key: value for key, value in config.items() if found.get(key) != value}
            if not differ:
                return made
            given |= differ
    return None
