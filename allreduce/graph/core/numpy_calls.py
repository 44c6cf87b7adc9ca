"""NumPy's functions and operators on tensors: call the operator of the same meaning.

NumPy dispatches to its arguments (NEP 13 for ufuncs, NEP 18 for other functions). Code written with
`np.` can therefore be traced wherever an operator exists. On tensors with values, functions without
an operator work too, and return arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core import pytree
from allreduce.graph.core.scope import users_line
from allreduce.keywords import explain

# The operators as functions of the same arguments, by NumPy's function. Those are built out of
# tensors, so their module fills this table instead of being imported here.
OPERATOR_OF: dict[Callable[..., Any], Callable[..., Any]] = {}
# Functions that write into an argument, their first one, by its name.
_WRITES: Mapping[Callable[..., Any], str] = {
    np.copyto: "dst",
    np.fill_diagonal: "a",
    np.place: "arr",
    np.put: "a",
    np.put_along_axis: "arr",
    np.putmask: "a",
}


class NumpyArgument:
    """Base of tensors and variables: implements NumPy's dispatch protocols."""

    __slots__ = ()

    @property
    def has_value(self) -> bool:
        """Whether it has a value that can be computed with now."""
        return True

    @explain()
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **named: Any) -> Any:
        if method == "__call__":
            return _call(ufunc, ufunc, inputs, named)
        function = getattr(ufunc, method)
        if method == "at":
            _refuse_to_write(function, inputs[0])
        return _call(None, function, inputs, named)

    @explain()
    def __array_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if function in _WRITES:
            _refuse_to_write(function, args[0] if args else kwargs.get(_WRITES[function]))
        return _call(function, function, args, kwargs)


def _call(
    key: Callable[..., Any] | None,
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """Call the operator registered for `key`, or `function` on arrays if all have values."""
    operator = None if key is None else OPERATOR_OF.get(key)
    traced = any(_is_traced(leaf) for leaf in pytree.leaves((tuple(args), dict(named))))
    out = _out(function, args, named)
    if out is not None:
        if operator is not None and traced:
            raise UsageError(
                f"{users_line()}: {_name(function)} inside ar.function makes a new tensor; it "
                "cannot write into out="
            )
        _refuse_to_write(function, out)
        operator = None
    if operator is not None:
        try:
            return _operate(operator, function, args, named)
        except ShapeError:
            raise
        except UsageError:  # something that NumPy does and the operator does not
            if traced:
                raise
    arrays, options = pytree.map_leaves(_as_array(function), (tuple(args), dict(named)))
    return function(*arrays, **options)


def _operate(
    operator: Callable[..., Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    try:
        inspect.signature(operator).bind(*args, **named)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(operator).parameters)
        raise UsageError(
            f"{users_line()}: np.{function.__name__} of tensors takes {parameters}: {error}"
        ) from None
    return operator(*args, **named)


def _out(function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return a function's `out` argument, given by name or by position."""
    if "out" in named or isinstance(function, np.ufunc):  # these have it by name
        return named.get("out")
    try:
        return inspect.signature(function).bind(*args, **named).arguments.get("out")
    except (TypeError, ValueError):  # no signature, or a wrong call
        return None


def _refuse_to_write(function: Callable[..., Any], into: Any) -> None:
    """Raise an error if a function would write to a tensor or a variable."""
    if any(isinstance(leaf, NumpyArgument) for leaf in pytree.leaves(into)):
        raise UsageError(
            f"{users_line()}: {_name(function)} cannot write into a tensor or a variable; "
            "variable.assign(value) changes a variable"
        )


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
