"""The current calls of layers on this thread: their mode, and whether they may make variables."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Protocol

from allreduce.errors import UsageError


class CalledLayer(Protocol):
    """A layer, as far as this module needs it."""

    name: str
    trainable: bool


class _Calls(threading.local):
    def __init__(self) -> None:
        self.stack: list[CalledLayer] = []  # outermost first
        self.training = False
        self.largest: int | None = None  # elements that a new variable may have


_calls = _Calls()


def in_training() -> bool:
    """Return whether the innermost layer was called in training mode."""
    return _calls.training


def frozen() -> bool:
    """Return whether one of the layers that are being called is not to be trained."""
    return not all(layer.trainable for layer in _calls.stack)


def caller() -> CalledLayer | None:
    """Return the innermost layer that is being called."""
    return _calls.stack[-1] if _calls.stack else None


@contextmanager
def calling(layer: CalledLayer, training: bool) -> Iterator[None]:
    """Note for the block that it calls a layer, and in which mode."""
    outer = _calls.training
    _calls.stack.append(layer)
    _calls.training = training
    try:
        yield
    finally:
        _calls.stack.pop()
        _calls.training = outer


@contextmanager
def limited(elements: int) -> Iterator[None]:
    """Refuse variables of more elements that the block makes, as a damaged file may ask for any."""
    outer, _calls.largest = _calls.largest, elements
    try:
        yield
    finally:
        _calls.largest = outer


def check_size(path: str, shape: Sequence[int]) -> None:
    """Refuse a variable that is larger than `limited` allows, before its memory is taken."""
    if _calls.largest is not None and prod(shape) > _calls.largest:
        raise UsageError(
            f"variable {path!r} is described with shape {tuple(shape)}, which is larger than every "
            "tensor in the file"
        )
