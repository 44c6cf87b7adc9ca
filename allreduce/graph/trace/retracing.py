"""Warn about functions that are traced repeatedly, naming the argument that causes it."""

from __future__ import annotations

import functools
import inspect
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from allreduce import events
from allreduce.graph.core import pytree
from allreduce.graph.core.spec import show
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.graph.trace.signature import Arguments

# As many of the last calls of a function, and as many traces among them, are worth a warning.
_CALLS, _TRACES = 6, 5


# The differences of two calls' `Arguments.around`, in its order.
_AROUND = (
    "it is called in another ar.device scope than before",
    "ar.config.passes were switched",
    "ar.config.enable_check_numerics was switched",
    "ar.config.enable_sync_errors was switched",
    "the number of inter-op threads was changed",
    "ar.set_seed was called with another number",
)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An argument of a traced call, without its value, which would stay alive.

    Attributes:
        key: Its part of the signature.
        is_array: Whether it is an array, or one per replica.
    """

    path: tuple[Any, ...]
    key: Hashable
    shown: str
    is_array: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that was traced."""

    outline: Hashable
    leaves: tuple[_Leaf, ...]
    around: tuple[Hashable, ...]


class Retracing:
    """Records the traced calls of one function; warns once."""

    def __init__(self) -> None:
        self._traced: deque[bool] = deque(maxlen=_CALLS)
        self._last: _Call | None = None
        self._warned = False

    def note(self, fn: Callable[..., Any], arguments: Arguments, traced: bool) -> None:
        """Record a traced call."""
        self._traced.append(traced)
        if self._warned or not traced:
            return
        last, self._last = self._last, _describe(arguments)
        if last is None or sum(self._traced) < _TRACES:
            return
        self._warned = True
        events.logger.warning(
            "%s was traced in %d of its last %d calls, and each trace takes long: %s",
            getattr(fn, "__qualname__", repr(fn)),
            sum(self._traced),
            len(self._traced),
            _difference(fn, last, self._last),
        )
        self._last = None


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


def _describe(arguments: Arguments) -> _Call:
    paths, leaves = pytree.paths(arguments.structure), pytree.leaves(arguments.structure)
    described = tuple(
        _Leaf(path, key, _shown(leaf), isinstance(leaf, PerReplica) or hasattr(leaf, "shape"))
        for path, key, leaf in zip(paths, arguments.keys, leaves, strict=True)
    )
    return _Call(pytree.outline(arguments.structure, ordered=True), described, arguments.around)


def _shown(leaf: Any) -> str:
    array = leaf.values[0] if isinstance(leaf, PerReplica) else leaf
    if not hasattr(array, "shape"):
        return f"{leaf!r:.60}"
    return f"{array.dtype}{show(array.shape)}"


def _difference(fn: Callable[..., Any], one: _Call, other: _Call) -> str:
    """Describe the difference between two calls."""
    if one.outline != other.outline:
        return "its arguments are nested in another way than before; keep their structure"
    for before, now in zip(one.leaves, other.leaves, strict=True):
        if before.key == now.key:
            continue
        was = f"argument {_name(fn, before.path)!r} was {before.shown} and then {now.shown}"
        if before.is_array:
            return (
                f"{was}; give it one shape and dtype, or pass it as a share of a batch "
                "(strategy.distribute_dataset)"
            )
        return (
            f"{was}, and Python values are part of a trace; pass it as an array, such as "
            "np.float32(...)"
        )
    for old, new, what in zip(one.around, other.around, _AROUND, strict=True):
        if old != new:
            return what
    return "it runs on one replica and on all in turn, or replicas had to start anew after an error"


def _name(fn: Callable[..., Any], path: tuple[Any, ...]) -> str:
    """Name a leaf of `(args, kwargs)` as the function's author does: `batch['x']`."""
    kind, first, *rest = path
    text = "".join(f".{each[1]}" if isinstance(each, tuple) else f"[{each!r}]" for each in rest)
    if kind == 1:
        return f"{first}{text}"
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        return f"{first}{text}"
    usual = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if first < len(usual):
        return f"{usual[first]}{text}"
    return f"arguments[{first}]{text}"
