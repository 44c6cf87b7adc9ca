"""Warn about functions that are traced again and again, and say what changed."""

from __future__ import annotations

import functools
import inspect
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from allreduce import events
from allreduce.graph.core import pytree
from allreduce.graph.core.spec import show
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.graph.trace.signature import Arguments

# As many of the last calls of a function, and as many traces among them, are worth a warning.
_CALLS, _TRACES = 6, 5


class Retracing:
    """Counts the traces of one function; warns once."""

    def __init__(self) -> None:
        self._traced: deque[bool] = deque(maxlen=_CALLS)
        self._signature: dict[str, str] = {}
        self._warned = False

    def note(self, fn: Callable[..., Any], arguments: Arguments, traced: bool) -> None:
        """Record a call."""
        self._traced.append(traced)
        if self._warned or not traced:
            return
        before, self._signature = self._signature, _signature(arguments)
        if sum(self._traced) < _TRACES:
            return
        self._warned = True
        events.logger.warning(
            "%s was traced in %d of its last %d calls, and each trace takes long: %s",
            getattr(fn, "__qualname__", repr(fn)),
            sum(self._traced),
            len(self._traced),
            _difference(before, self._signature),
        )


class Discarded:
    """Records short-lived traced functions by their code; warns once for each code."""

    def __init__(self) -> None:
        self._in_a_row: Counter[object] = Counter()
        self._warned: set[object] = set()

    def add(self, code: object, steps: int) -> None:
        """Record that a traced function was deleted after this number of steps."""
        self._in_a_row[code] = self._in_a_row[code] + 1 if steps <= 1 else 0

    def note(self, fn: Callable[..., Any]) -> None:
        """Record a function's first trace."""
        code = code_of(fn)
        if code is None or code in self._warned or self._in_a_row[code] + 1 < _TRACES:
            return
        self._warned.add(code)
        events.logger.warning(
            "%s was traced in %d of its last %d calls, and each trace takes long: the function is "
            "made anew at each call; make it once, outside of the loop, and pass what differs as "
            "arguments",
            getattr(fn, "__qualname__", repr(fn)),
            *(_TRACES, _TRACES),
        )


def code_of(fn: Callable[..., Any]) -> object:
    """Return the code that functions made at the same place share; None if unknown.

    Functions of this library, such as each model's `predict_step`, are not counted.
    """
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif hasattr(fn, "python_function"):
            fn = fn.python_function
        else:
            ours = str(getattr(fn, "__module__", None)).startswith("allreduce.")
            return None if ours or inspect.ismethod(fn) else getattr(fn, "__code__", None)


def _signature(arguments: Arguments) -> dict[str, str]:
    """Describe each argument, as in `{"args[0]": "float32(3,)"}`, without keeping its value."""
    paths, leaves = pytree.paths(arguments.structure), pytree.leaves(arguments.structure)
    return {_name(path): _shown(leaf) for path, leaf in zip(paths, leaves, strict=True)}


def _name(path: tuple[Any, ...]) -> str:
    steps = (f".{each[1]}" if isinstance(each, tuple) else f"[{each!r}]" for each in path[1:])
    return ("args", "kwargs")[path[0]] + "".join(steps)


def _shown(leaf: Any) -> str:
    array = leaf.values[0] if isinstance(leaf, PerReplica) else leaf
    if not hasattr(array, "shape"):
        return f"{leaf!r:.60}"
    return f"{array.dtype}{show(array.shape)}"


def _difference(before: dict[str, str], now: dict[str, str]) -> str:
    for name in {**before, **now}:
        was, is_now = before.get(name, "missing"), now.get(name, "missing")
        if was != is_now:
            return (
                f"its signature changes: {name} was {was} and is now {is_now}; pass arrays of one "
                "shape and dtype, or shares of a batch (strategy.distribute_dataset), and numbers "
                "that change as np.float32(...)"
            )
    return "its arguments stay, but its device scope, a setting of ar.config or the seed changes"
