"""Shared by operator families: NumPy's promotion, element-wise rows, undoing a broadcast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.numpy_calls import OPERATOR_OF
from allreduce.graph.core.op_table import NATIVE, Attrs, Gradient, Kernel, ShapeRule, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import (
    BATCH,
    GLOBAL_BATCH,
    Dim,
    Shape,
    Size,
    Spec,
    broadcast,
    concrete,
    normal,
    show,
)
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_dtype
from allreduce.graph.trace.dispatch import apply, as_tensor

# A Python number adapts to the other operand's dtype (NumPy's NEP 50).
_WEAK = (int, float)


def cast(x: Any, dtype: Any) -> Tensor:
    """Convert to another dtype; costs nothing where the dtype is already right.

    Raises:
        UsageError: There is no such dtype, or tensors cannot have it.
    """
    tensor, wanted = as_tensor(x), as_dtype(dtype)
    return tensor if tensor.dtype == wanted else apply("cast", tensor, dtype=wanted)


def promote(ufunc: np.ufunc, *values: Any) -> list[Tensor]:
    """Make tensors of the operands, cast to the dtype of `ufunc`'s loop."""
    operands = _operands(values)
    kinds = [each.dtype if isinstance(each, Tensor) else type(each) for each in operands]
    try:
        dtypes = ufunc.resolve_dtypes((*kinds, *[None] * ufunc.nout))
        return [_operand(each, dtype) for each, dtype in zip(operands, dtypes, strict=False)]
    except (TypeError, OverflowError) as error:
        raise UsageError(f"{users_line()}: {ufunc.__name__}: {error}") from None


def promote_together(*values: Any) -> list[Tensor]:
    """Make tensors of the operands, cast to the one dtype that holds them all."""
    operands = _operands(values)
    dtype = np.result_type(*[each.dtype if isinstance(each, Tensor) else each for each in operands])
    try:
        return [_operand(each, dtype) for each in operands]
    except OverflowError as error:
        raise UsageError(f"{users_line()}: {error}") from None


def _operands(values: Sequence[Any]) -> list[Any]:
    """Make tensors of all but Python numbers, and of these too where there is nothing else."""
    weak = [type(value) in _WEAK for value in values]
    if all(weak):
        return [as_tensor(value) for value in values]
    return [value if w else as_tensor(value) for value, w in zip(values, weak, strict=True)]


def _operand(value: Any, dtype: np.dtype[Any]) -> Tensor:
    return cast(value, dtype) if isinstance(value, Tensor) else as_tensor(value, dtype)


def as_floats(x: Any) -> Tensor:
    """Make a tensor of floats; integers become float64, as they do in `np.mean`."""
    tensor = as_tensor(x)
    return tensor if tensor.dtype.kind == "f" else cast(tensor, np.float64)


def as_integers(what: str, x: Any) -> Tensor:
    """Make a tensor of integers; refuse anything else."""
    tensor = as_tensor(x)
    if tensor.dtype.kind not in "iu":
        raise UsageError(f"{users_line()}: {what} are integers, got {tensor.dtype}")
    return tensor


def unary(ufunc: np.ufunc, doc: str, gradient: Gradient | None = None) -> Callable[[Any], Tensor]:
    """Register a NumPy ufunc of one operand as the operator of its name; returns its function."""

    def operator(x: Any) -> Tensor:
        return apply(ufunc.__name__, *promote(ufunc, x))

    _elementwise(ufunc, operator, doc, gradient)
    return operator


def binary(
    ufunc: np.ufunc, doc: str, gradient: Gradient | None = None
) -> Callable[[Any, Any], Tensor]:
    """Register a NumPy ufunc of two operands as the operator of its name; returns its function."""

    def operator(a: Any, b: Any) -> Tensor:
        return apply(ufunc.__name__, *promote(ufunc, a, b))

    _elementwise(ufunc, operator, doc, gradient)
    return operator


def _elementwise(
    ufunc: np.ufunc, operator: Callable[..., Tensor], doc: str, gradient: Gradient | None
) -> None:
    operator.__name__ = operator.__qualname__ = ufunc.__name__
    operator.__doc__ = doc
    OPERATOR_OF[ufunc] = operator

    def shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
        dtypes = ufunc.resolve_dtypes((*[spec.dtype for spec in specs], *[None] * ufunc.nout))
        return Spec(broadcast([spec.shape for spec in specs]), dtypes[-1])

    def kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
        ufunc(*inputs, out=out)

    register(ufunc.__name__, shape, kernel, gradient, elementwise=True, in_place=True)


def same_spec(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    """The shape rule of an operator whose output is like its first input."""
    return specs[0]


def given_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    """The shape rule of an operator whose attributes have the shape."""
    return Spec(attrs["shape"], specs[0].dtype)


def floats_only(rule: ShapeRule) -> ShapeRule:
    """Refuse inputs that are not floats; the public functions cast before they get here."""

    def checked(specs: Sequence[Spec], attrs: Attrs) -> Spec:
        for spec in specs:
            if spec.dtype.kind != "f":
                raise ShapeError(f"needs floats, got {spec}")
        return rule(specs, attrs)

    return checked


def unbroadcast(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over the axes along which `like` was broadcast."""
    if gradient.shape == like.shape:
        return gradient
    return apply("sum_to", gradient, shape=like.shape)


def split(condition: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Split a gradient: the first part is 0 where the condition is false, the second elsewhere."""
    zero = as_tensor(0, gradient.dtype)
    return apply("where", condition, gradient, zero), apply("where", condition, zero, gradient)


def zeros_like(x: Tensor) -> Tensor:
    """Make zeros of a tensor's shape and dtype."""
    return apply("fill", shape=x.shape, dtype=x.dtype, value=0)


def swap_axes(x: Tensor, a: int, b: int) -> Tensor:
    """Exchange two axes, in a view."""
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return x if a == b else apply("transpose", x, axes=tuple(order))


def reshaped(x: Tensor, shape: Sequence[Size]) -> Tensor:
    """Reshape; at most one size may be -1, and sizes may be named."""
    wanted = infer_shape(x.shape, tuple(shape))
    if wanted == x.shape:
        return x
    named = tuple((axis, size) for axis, size in enumerate(x.shape) if isinstance(size, Dim))
    own_names = {size.name for _, size in named}
    if all(size.name in own_names for size in wanted if isinstance(size, Dim)):
        return apply("reshape", x, shape=wanted, named=named)
    # Empty, and so without an axis that gives the length of named ones at run time.
    rowless = tuple(1 if isinstance(size, Dim) else size for size in wanted)
    return apply("broadcast_to", reshaped(x, rowless), shape=wanted)


def infer_shape(old: Shape, new: Shape) -> Shape:
    """Replace the -1 of a reshape and check that no element is lost."""
    what = f"{users_line()}: cannot reshape {show(old)} to {show(new)}"
    new = tuple(map(normal, new))
    unknown = [axis for axis, size in enumerate(new) if size == -1]
    if len(unknown) > 1:
        raise ShapeError(f"{what}: only one size can be -1")
    total, part = _count(old), _count([size for size in new if size != -1])
    if not unknown:
        if part != total:
            raise ShapeError(f"{what}: {_elements(total)} elements are not {_elements(part)}")
        return new
    axis = unknown[0]
    size = _quotient(total, part)
    if size is None:
        several = len([*(total[1] - part[1]).elements()]) > 1
        why = "-1 would be more than one named size" if several else "no whole size for -1"
        raise ShapeError(f"{what}: {why}")
    return (*new[:axis], size, *new[axis + 1 :])


# How many elements: a number times sizes that have names. Where the number is 0 they say nothing.
_Count = tuple[int, Counter[str]]


def _count(shape: Sequence[Size]) -> _Count:
    number = prod(size.factor if isinstance(size, Dim) else size for size in shape)
    names = Counter(size.name for size in shape if isinstance(size, Dim))
    return number, names if number else Counter()


def _elements(count: _Count) -> str:
    number, names = count
    return "*".join([str(number), *names.elements()])


def _quotient(total: _Count, part: _Count) -> Size | None:
    (number, names), (divisor, others) = total, part
    if not number or not divisor:
        return 0 if divisor else None
    rest = [*(names - others).elements()]
    if number % divisor or not others <= names or len(rest) > 1:
        return None
    return Dim(rest[0], number // divisor) if rest else number // divisor


def running_shape(shape: Shape, x: np.ndarray, named: Sequence[tuple[int, Dim]]) -> tuple[int, ...]:
    """Give named sizes the values they have in this run, read off the `named` axes of `x`."""
    sizes = {size.name: x.shape[axis] // size.factor for axis, size in named}
    return concrete(shape, sizes.get(BATCH.name, 0), sizes.get(GLOBAL_BATCH.name, 0))


def kept_shape(shape: Shape, axes: Sequence[int]) -> Shape:
    """Set the sizes of reduced axes to 1."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


def through_float32(kernel: Kernel) -> Kernel:
    """Let a native kernel, which knows float32 and float64 only, serve other floats too.

    Its inputs are made C-contiguous.
    """

    def converting(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
        if out.dtype in NATIVE:
            kernel(out, [np.asarray(x, order="C") for x in inputs], attrs)
            return
        wide = [
            np.asarray(x, np.float32 if x.dtype.kind == "f" else None, order="C") for x in inputs
        ]
        result = np.empty(out.shape, np.float32)
        kernel(result, wide, attrs)
        np.copyto(out, result, casting="unsafe")

    return converting
