"""What a layer holds among its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

P = TypeVar("P")


def parts_in(key: str, value: Any, kind: type[P]) -> Iterator[tuple[str, P]]:
    """Go through the parts of a kind in an attribute: itself, or in lists and dicts."""
    if isinstance(value, kind):
        yield key, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from parts_in(f"{key}/{index}", item, kind)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from parts_in(f"{key}/{name}", item, kind)
