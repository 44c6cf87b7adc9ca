"""The layers that are being called on this thread, and in which mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allreduce.nn.layer import Layer


class _Calls(threading.local):
    def __init__(self) -> None:
        self.stack: list[Layer] = []  # outermost first
        self.training = False


_calls = _Calls()


def in_training() -> bool:
    """Tell whether the innermost layer was called in training mode."""
    return _calls.training


def frozen() -> bool:
    """Tell whether one of the layers that are being called is not to be trained."""
    return not all(layer.trainable for layer in _calls.stack)


def caller() -> Layer | None:
    """Return the innermost layer that is being called."""
    return _calls.stack[-1] if _calls.stack else None


@contextmanager
def calling(layer: Layer, training: bool) -> Iterator[None]:
    """Note for the block that it calls a layer, and in which mode."""
    outer = _calls.training
    _calls.stack.append(layer)
    _calls.training = training
    try:
        yield
    finally:
        _calls.stack.pop()
        _calls.training = outer
