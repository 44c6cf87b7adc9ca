"""Nested tuples, lists and dicts: take them apart into leaves and put them together again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any


def leaves(structure: Any) -> list[Any]:
    """List the leaves: depth first, dict values in the order of their keys' insertion."""
    found: list[Any] = []
    map_leaves(found.append, structure)
    return found


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Rebuild the structure with `function` applied to each leaf."""
    if isinstance(structure, dict):
        return {key: map_leaves(function, value) for key, value in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_leaves(function, value) for value in structure))
    if isinstance(structure, list | tuple):
        return type(structure)(map_leaves(function, value) for value in structure)
    return function(structure)


def replace_leaves(structure: Any, values: Iterator[Any]) -> Any:
    """Rebuild the structure with its leaves taken from `values`, in the order of `leaves`."""
    return map_leaves(lambda _: next(values), structure)


def outline(structure: Any) -> Hashable:
    """Describe the structure without its leaves, to compare and hash."""
    if isinstance(structure, dict):
        return ("dict", tuple((key, outline(value)) for key, value in structure.items()))
    if isinstance(structure, list | tuple):
        return (type(structure), tuple(outline(value) for value in structure))
    return "leaf"
