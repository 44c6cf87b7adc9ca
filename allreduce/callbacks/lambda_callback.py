"""`LambdaCallback`: functions in place of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allreduce.callbacks.base import HOOKS, Callback
from allreduce.errors import UsageError, unknown_name


class LambdaCallback(Callback):
    """Calls functions, on every rank, as `fit` calls the methods of a Callback.

    Args:
        functions: By the method's name: `on_epoch_end=lambda epoch, logs: print(logs)`.

    Raises:
        UsageError: There is no such method, or it is no function.
    """

    def __init__(self, **functions: Callable[..., Any] | None) -> None:
        for name, function in functions.items():
            if name not in HOOKS:
                raise unknown_name("method of a callback", name, HOOKS)
            if function is None:
                continue
            if not callable(function):
                raise UsageError(f"LambdaCallback takes a function {name}, not {function!r}")
            setattr(self, name, function)
