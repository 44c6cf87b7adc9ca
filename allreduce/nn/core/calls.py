"""The current calls of layers on this thread: their mode, and whether they may make variables."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Protocol

from allreduce.errors import UsageError
from allreduce.graph.core.scope import users_line


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


def check_made(layer: object) -> None:
    """Refuse a layer whose constructor did not call `super().__init__()`."""
    if not _is_made(layer):
        raise UsageError(f"{_not_constructed(layer)} first")


def check_attributes(layer: object, name: str) -> None:
    """Return why such a layer lacks an attribute."""
    if not _is_made(layer):
        raise AttributeError(
            f"{_not_constructed(layer)} before self.{name} is asked for", name="", obj=layer
        )


def _is_made(layer: object) -> bool:
    return "replicator" in vars(layer)


def _not_constructed(layer: object) -> str:
    return f"{type(layer).__name__}.__init__ has to call super().__init__()"


def check_given(path: str | None, kind: type, outputs: object) -> None:
    """Refuse a layer's outputs that are none."""
    if outputs is None:
        raise UsageError(
            f"{users_line()}: layer {path!r} gave None; return the outputs from "
            f"{kind.__name__}.call"
        )
