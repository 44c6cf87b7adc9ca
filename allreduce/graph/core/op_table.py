"""The operator table: an operator is one row with its shape rule, gradient and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec

import numpy as np

from allreduce.devices.registry import kernel
from allreduce.errors import InternalError, UsageError, reworded, unknown_name
from allreduce.graph.core.node import describe_part
from allreduce.graph.core.spec import Spec

P = ParamSpec("P")
Attrs = Mapping[str, Any]
ShapeRule = Callable[[Sequence[Spec], Attrs], Spec]
# Writes the value into its first argument. That has the shape rule's shape and dtype, is
# C-contiguous and uninitialised, and overlaps no input (but see `Op.in_place`). Inputs may be
# strided. Callers run kernels under one `np.errstate(all="ignore")`: infinities and NaN are
# results, not warnings. Its return value is ignored. Arrays are those of the device's kind.
Kernel = Callable[[np.ndarray, Sequence[np.ndarray], Attrs], object]
# Returns the value, which shares memory with the only input.
View = Callable[[np.ndarray, Attrs], np.ndarray]
# (gradient of the output, output, inputs, attrs) -> gradient of each input, or None where it has
# none. All are Tensors; the gradient is written with the public operators, so it is itself traced.
Gradient = Callable[[Any, Any, Sequence[Any], Attrs], Sequence[Any]]
# compute: a kernel; source: the executor provides the value; effect: it changes a variable;
# collective: every replica takes part; transfer: between two devices of one replica; loop: repeats
# a subgraph, or is one of its results.
Kind = Literal["compute", "source", "effect", "collective", "transfer", "loop"]


NATIVE = (np.dtype(np.float32), np.dtype(np.float64))  # the dtypes of native kernels


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table.

    Attributes:
        name: A unique name, shown in printed graphs.
        shape: Computes the output's spec from the inputs' specs and attributes; raises ShapeError.
        cpu: The NumPy or native kernel; None for a view, and if the executor runs the operation.
        gradient: None for an operator without one (its output must not depend on a variable
            smoothly).
        kind: The kind of operation, for the schedule.
        view: Returns a view of the input, instead of a kernel.
        elementwise: Whether each output element depends only on the input elements that broadcast
            to it, so that native chains may compute it.
        in_place: Whether the output may be an input of the same shape and dtype: the kernel reads
            all that it needs of an element before it writes there.
        is_product: Whether it adds up products of its inputs, which mixed precision shortens.
        host: Whether it always runs on a CPU, such as operations with input or output.
        cuda: A user's GPU kernel; the library's are in tables of the kinds of devices.
        users: Whether a user has added it; its kernels are then checked more closely.
    """

    name: str
    shape: ShapeRule
    cpu: Kernel | None = None
    gradient: Gradient | None = None
    kind: Kind = "compute"
    view: View | None = None
    elementwise: bool = False
    in_place: bool = False
    is_product: bool = False
    host: bool = False
    cuda: Kernel | None = None
    users: bool = False

    def kernel(self, kind: str | None) -> Kernel | None:
        """Return the kernel for a kind of device, if there is one."""
        if kind == "CPU":
            return self.cpu
        return (self.cuda if kind == "GPU" else None) or kernel(kind, self.name)

    def runs_on(self, kind: str | None) -> bool:
        """Return whether a kind of device can run it: it has a kernel, or needs none."""
        if kind == "CPU" or self.kernel(kind) is not None:
            return True
        return self.cpu is None and not self.host


def located(error: UsageError, name: str, line: str, part: str) -> UsageError:
    """Add the user's line and the layer to a kernel's error; the kernel may be the user's, too."""
    text = f"{line}: {f'{describe_part(part)}: ' if part else ''}{name}: {error}"
    return reworded(error, text).with_traceback(error.__traceback__)


def cut(gradient: Any, output: Any, inputs: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """The gradient of an operator that is constant almost everywhere: none."""
    return [None] * len(inputs)


_TABLE: dict[str, Op] = {}


def _registering(make: Callable[P, Op]) -> Callable[P, Op]:
    def register(*fields: P.args, **others: P.kwargs) -> Op:
        """Add a row; takes its fields."""
        op = make(*fields, **others)
        if op.name in _TABLE:
            raise InternalError(f"operator {op.name!r} is registered twice")
        _TABLE[op.name] = op
        return op

    return register


register = _registering(Op)


def lookup(name: str) -> Op:
    """Return a row by name."""
    try:
        return _TABLE[name]
    except KeyError:
        raise unknown_name("operator", name, _TABLE) from None


def names() -> tuple[str, ...]:
    """List all operators."""
    return tuple(_TABLE)
