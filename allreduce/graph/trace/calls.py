"""Canonicalize calls, so that equal calls share a trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from allreduce.graph.core import pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Nearly all defaults, for a quick test in each call.
_USUAL = frozenset({bool, int, float, str, type(None)})

_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def canonical(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Pass arguments by position where possible, and add omitted defaults.

    Only defaults that are Python values are added: an array would become an argument, without a
    value in the trace. A call that does not match the signature is not changed; making it raises.
    """
    plain, before = (fn.__func__, (fn.__self__,)) if inspect.ismethod(fn) else (fn, ())
    given = (*before, *args)
    if inspect.isfunction(plain) and not kwargs and not plain.__kwdefaults__:
        missing = plain.__code__.co_argcount - len(given)
        tail = (plain.__defaults__ or ())[-missing:] if missing > 0 else ()
        if len(tail) == missing and all(map(_is_value, tail)):  # the usual call, quickly
            return (*args, *tail), kwargs
    try:
        call = _signature_of(plain).bind(*given, **kwargs)
    except (TypeError, ValueError):  # no such call; or nothing to find a signature by
        return tuple(args), kwargs
    _fill_in(call)
    return call.args[len(before) :], call.kwargs


def _signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    found = _signatures.get(fn)
    if found is None:
        # The decorator's own signature: the wrapped function may have another.
        found = inspect.signature(fn, follow_wrapped=False)
        parameters = [each.replace(annotation=each.empty) for each in found.parameters.values()]
        found = found.replace(parameters=parameters, return_annotation=found.empty)
        # Other defaults may refer to the function, which the dictionary would then keep for ever.
        if all(type(each.default) in _USUAL or each.default is each.empty for each in parameters):
            _signatures[fn] = found
    return found


def _fill_in(call: inspect.BoundArguments) -> None:
    """Add the defaults that are Python values, and put all in the order of the signature."""
    filled: dict[str, Any] = {}
    by_position = True  # arguments after an omitted default cannot be positional
    for name, parameter in call.signature.parameters.items():
        if name in call.arguments:
            filled[name] = call.arguments[name]
        elif parameter.default is parameter.empty:
            continue
        elif _is_value(parameter.default) and (
            by_position or parameter.kind is not parameter.POSITIONAL_ONLY
        ):
            filled[name] = parameter.default
        else:
            by_position = False
    call.arguments = filled


def _is_value(default: Any) -> bool:
    """Return whether a default is a Python value, which becomes a part of the signature.

    A dataclass is not: tracing would see a copy, and changes by a step would be lost.
    """
    if type(default) in _USUAL:
        return True
    if isinstance(default, tuple):
        return all(map(_is_value, default))
    if pytree.treedef(default) != pytree.treedef(None) or not isinstance(default, Hashable):
        return False
    return not any(hasattr(default, name) for name in ("shape", "__dlpack__"))
