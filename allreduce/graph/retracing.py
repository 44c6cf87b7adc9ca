"""Notice a function that is traced again and again, and say which argument is to blame."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

from allreduce import events
from allreduce.graph import nest
from allreduce.graph.per_replica import PerReplica
from allreduce.graph.signature import Arguments
from allreduce.graph.spec import show

# As many of the last calls of a function, and as many traces among them, are worth a warning.
_CALLS, _TRACES = 6, 5


class Retracing:
    """Watches the calls of one function; warns once."""

    def __init__(self) -> None:
        self._traced: deque[bool] = deque(maxlen=_CALLS)
        self._last: Arguments | None = None
        self._warned = False

    def note(self, fn: Callable[..., Any], arguments: Arguments, traced: bool) -> None:
        """Take note of a call."""
        self._traced.append(traced)
        last, self._last = self._last, arguments if traced else self._last
        if last is None or self._warned or sum(self._traced) < _TRACES:
            return
        self._warned = True
        events.logger.warning(
            "%s was traced in %d of its last %d calls, and each trace takes long: %s",
            getattr(fn, "__qualname__", repr(fn)),
            sum(self._traced),
            len(self._traced),
            difference(fn, last, arguments),
        )


def difference(fn: Callable[..., Any], one: Arguments, other: Arguments) -> str:
    """Say what tells two calls apart."""
    if nest.outline(one.structure) != nest.outline(other.structure):
        return "its arguments are nested in another way than before; keep their structure"
    leaves = (nest.leaves(each.structure) for each in (one, other))
    paths = nest.paths(one.structure)
    for path, before, now, old, new in zip(paths, *leaves, one.keys, other.keys, strict=True):
        if old == new:
            continue
        name = _name(fn, path)
        if isinstance(before, PerReplica) or hasattr(before, "shape"):
            return (
                f"argument {name!r} was {_array(before)} and then {_array(now)}; give it one "
                "shape and dtype, or pass it as a share of a batch (strategy.distribute_dataset)"
            )
        return (
            f"argument {name!r} was {before!r:.60} and then {now!r:.60}, and Python values are "
            "part of a trace; pass it as an array, such as np.float32(...)"
        )
    return "it is called in another ar.device scope than before"


def _array(value: Any) -> str:
    array = value.values[0] if isinstance(value, PerReplica) else value
    if not hasattr(array, "shape"):
        return f"{value!r:.60}"
    return f"{array.dtype}{show(array.shape)}"


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
