"""The fast path: synchronous calls of plain NumPy arrays run natively from the call itself on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from allreduce import _native
from allreduce.comm.calls.call import kind

F = TypeVar("F", bound=Callable[..., Any])


def fast_path(
    operators: Sequence[str | None] = (None,), default: str | None = None
) -> Callable[[F], F]:
    """Decorate a collective's method so that native code carries out calls of plain arrays.

    The method itself gets everything else: other arrays, arrays that need a copy, wrong arguments,
    `counts`, factors and `async_op`, and all calls on transports without a `FastTransport`.

    Args:
        operators: The operators that the collective takes; None if it takes none.
        default: The operator of a call that names none.
    """

    def decorate(method: F) -> F:
        kinds = {op: kind(method.__name__, op) for op in operators}
        native: Any = _native.QuickMethod(method, kinds, default)
        return cast(F, functools.update_wrapper(native, method))

    return decorate
