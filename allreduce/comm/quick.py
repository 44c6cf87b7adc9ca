"""The quick way: synchronous calls of plain NumPy arrays are native from the caller's line on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from allreduce import _native
from allreduce.comm.call import kind

F = TypeVar("F", bound=Callable[..., Any])


def quick(operators: Sequence[str | None] = (None,), usual: str | None = None) -> Callable[[F], F]:
    """Have a collective's method take plain arrays the quick way.

    What is not plain goes to the method itself: other arrays, those that need a copy, wrong
    arguments, `counts`, factors and `async_op`, and all calls on transports that have no such way.

    Args:
        operators: Those it takes; None where there is none.
        usual: The operator without one.
    """

    def decorate(method: F) -> F:
        kinds = {op: kind(method.__name__, op) for op in operators}
        native: Any = _native.QuickMethod(method, kinds, usual)
        return cast(F, functools.update_wrapper(native, method))

    return decorate
