"""NumPy's functions and operators on tensors: the operator of the same meaning is called instead.

NumPy asks its arguments before it computes (NEP 13 for ufuncs, NEP 18 for other functions). So code
written with `np.` can be traced wherever there is an operator; on tensors that exist the rest
works, too, and gives arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from allreduce.errors import UsageError
from allreduce.graph import nest
from allreduce.graph.scope import users_line

# The operators as functions of the same arguments, by NumPy's function. Those are built out of
# tensors, so their module fills this table instead of being imported here.
OPERATOR_OF: dict[Callable[..., Any], Callable[..., Any]] = {}


class NumpyArgument:
    """What NumPy's functions and ufuncs hand over to us."""

    __slots__ = ()

    has_value: ClassVar[bool] = True  # else there is no array of it yet

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **named: Any) -> Any:
        if method == "__call__":
            return _call(ufunc, ufunc, inputs, named)
        return _call(None, getattr(ufunc, method), inputs, named)

    def __array_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return _call(function, function, args, kwargs)


def _call(
    key: Callable[..., Any] | None,
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """Call the operator that stands for `key`, or `function` on arrays, where these exist."""
    operator = None if key is None else OPERATOR_OF.get(key)
    if named.get("out") is not None:
        if operator is not None and any(_is_traced(leaf) for leaf in nest.leaves(list(args))):
            raise UsageError(
                f"{users_line()}: {_name(function)} inside ar.function makes a new tensor; it "
                "cannot write into out="
            )
        operator = None
    if operator is None:
        args, named = nest.map_leaves(_as_array(function), (tuple(args), dict(named)))
        return function(*args, **named)
    try:
        inspect.signature(operator).bind(*args, **named)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(operator).parameters)
        raise UsageError(
            f"{users_line()}: np.{function.__name__} of tensors takes {parameters}: {error}"
        ) from None
    return operator(*args, **named)


def _is_traced(value: Any) -> bool:
    return isinstance(value, NumpyArgument) and not value.has_value


def _name(function: Callable[..., Any]) -> str:
    module = (getattr(function, "__module__", "") or "numpy").replace("numpy", "np", 1)
    return f"{module}.{getattr(function, '__qualname__', getattr(function, '__name__', ''))}"


def _as_array(function: Callable[..., Any]) -> Callable[[Any], Any]:
    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, NumpyArgument):
            return leaf
        if _is_traced(leaf):
            raise UsageError(
                f"{users_line()}: {_name(function)} has no operator that could be traced inside "
                "ar.function; use ar.ops, or return the tensor and call it on the value"
            )
        return np.asarray(leaf)

    return convert
