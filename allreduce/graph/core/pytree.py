"""Nested tuples, lists, dicts and dataclasses: flatten them to leaves, and rebuild them.

A dataclass that is a leaf, such as PerReplica, sets `__leaf__` in its class.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from operator import itemgetter
from typing import Any

_SEQUENCES = (list, tuple)


def leaves(structure: Any) -> list[Any]:
    """List the leaves: depth first, dict values in the order of their keys."""
    found: list[Any] = []
    _gather(structure, found)
    return found


def _gather(structure: Any, found: list[Any]) -> None:
    """Append the leaves. Called in each step, so it builds nothing else."""
    if isinstance(structure, _SEQUENCES):
        for value in structure:
            _gather(value, found)
    elif isinstance(structure, dict):
        for _, value in _items(structure):
            _gather(value, found)
    elif _is_record(structure):
        for field in dataclasses.fields(structure):
            _gather(getattr(structure, field.name), found)
    else:
        found.append(structure)


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Rebuild the structure with `function` applied to each leaf."""
    if isinstance(structure, dict):
        mapped = copy.copy(structure)  # of its class, in its order
        for key, value in _items(structure):
            mapped[key] = map_leaves(function, value)
        return mapped
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_leaves(function, value) for value in structure))
    if isinstance(structure, _SEQUENCES):
        return type(structure)(map_leaves(function, value) for value in structure)
    if _is_record(structure):
        rebuilt = copy.copy(structure)
        for field in dataclasses.fields(structure):
            value = map_leaves(function, getattr(structure, field.name))
            object.__setattr__(rebuilt, field.name, value)  # a frozen one, too
        return rebuilt
    return function(structure)


def paths(structure: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the path of each leaf: indices, dict keys, and `(None, name)` for a dataclass field."""
    if isinstance(structure, dict):
        parts = _items(structure)
    elif isinstance(structure, _SEQUENCES):
        parts = list(enumerate(structure))
    elif _is_record(structure):
        fields = dataclasses.fields(structure)
        parts = [((None, each.name), getattr(structure, each.name)) for each in fields]
    else:
        return [above]
    return [path for key, value in parts for path in paths(value, (*above, key))]


def replace_leaves(structure: Any, values: Iterator[Any]) -> Any:
    """Rebuild the structure with its leaves taken from `values`, in the order of `leaves`."""
    return map_leaves(lambda _: next(values), structure)


def treedef(structure: Any, ordered: bool = False) -> Hashable:
    """Describe the structure without its leaves, as a hashable value.

    Args:
        ordered: Whether dicts with another insertion order differ.
    """
    if isinstance(structure, _SEQUENCES):
        return (type(structure), tuple([treedef(value, ordered) for value in structure]))
    if isinstance(structure, dict):
        items = structure.items() if ordered else _items(structure)
        return (type(structure), tuple([(key, treedef(value, ordered)) for key, value in items]))
    if _is_record(structure):
        names = [field.name for field in dataclasses.fields(structure)]
        parts = tuple(treedef(getattr(structure, name), ordered) for name in names)
        return (type(structure), parts)
    return "leaf"


def _items(structure: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return a dict's items sorted by key, so that equal dicts give equal lists.

    An OrderedDict, and keys that cannot be compared, keep their insertion order.
    """
    items = list(structure.items())
    if len(items) < 2 or isinstance(structure, OrderedDict):
        return items
    try:
        return sorted(items, key=itemgetter(0))
    except TypeError:
        return items


def _is_record(value: Any) -> bool:
    """Return whether this is a dataclass instance that is not a leaf."""
    kind = type(value)  # as dataclasses.is_dataclass looks, in a fifth of the time
    return hasattr(kind, "__dataclass_fields__") and not getattr(kind, "__leaf__", False)
