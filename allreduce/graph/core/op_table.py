"""The operator table: an op is one row with its shape rule, its gradient and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from allreduce.errors import InternalError, UsageError, reworded, unknown_name
from allreduce.graph.core.node import describe_part
from allreduce.graph.core.spec import Spec

Attrs = Mapping[str, Any]
ShapeRule = Callable[[Sequence[Spec], Attrs], Spec]
# Writes the value into its first argument. That has the shape rule's shape and dtype, is
# C-contiguous, may hold anything, and overlaps no input (but see `Op.in_place`). Inputs may be
# strided. Callers run kernels under one `np.errstate(all="ignore")`: infinities and NaN are
# results, not warnings. What it returns is not looked at. Arrays are those of the device's kind.
Kernel = Callable[[np.ndarray, Sequence[np.ndarray], Attrs], object]
# Returns the value, which shares memory with the only input.
View = Callable[[np.ndarray, Attrs], np.ndarray]
# (gradient of the output, output, inputs, attrs) -> gradient of each input, or None where it has
# none. All are Tensors; the gradient is written with the public operators, so it is itself traced.
Gradient = Callable[[Any, Any, Sequence[Any], Attrs], Sequence[Any]]
# compute: a kernel; source: the executor provides the value; effect: it changes a variable;
# collective: every replica takes part; transfer: between two devices of one replica; loop: a graph
# of its own is repeated, or one of its results.
Kind = Literal["compute", "source", "effect", "collective", "transfer", "loop"]


_NATIVE = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table.

    Attributes:
        name: Unique; what a printed graph shows.
        shape: From the inputs' specs and the attributes to the output's spec; raises ShapeError.
        cpu: The NumPy or native kernel; None for a view, and where the executor itself carries
            the operation out.
        gradient: None for an op that has none (its output must not depend on a variable smoothly).
        kind: What the schedule has to know.
        view: In place of a kernel, for a value that shares memory with its input and costs nothing.
        elementwise: Whether each element of the output depends on the elements of the inputs that
            broadcast to it alone, so that the kernel may be given parts.
        in_place: Whether the kernel also works where its output is an input of that shape and
            dtype: it reads all that it needs of an element before it writes there.
        by_rows: Whether the output's rows are made of the rows of the first input, each by itself,
            so that the kernel may be given some of both.
        host: Whether it stays on a CPU whatever kernels there are, as what talks to the world does.
        cuda: The kernel for GPUs, where there is one. What needs a kernel runs there only with it.
        users: Whether a user has added it, so that its kernels may do what they are not to.
    """

    name: str
    shape: ShapeRule
    cpu: Kernel | None = None
    gradient: Gradient | None = None
    kind: Kind = "compute"
    view: View | None = None
    elementwise: bool = False
    in_place: bool = False
    by_rows: bool = False
    host: bool = False
    cuda: Kernel | None = None
    users: bool = False

    def kernel(self, kind: str | None) -> Kernel | None:
        """Return the kernel for a kind of device, if there is one."""
        return {"CPU": self.cpu, "GPU": self.cuda}.get(kind or "")

    def runs_on(self, kind: str | None) -> bool:
        """Whether a kind of device can do it: with a kernel, or where none is needed."""
        if kind == "CPU" or self.kernel(kind) is not None:
            return True
        return self.cpu is None and not self.host


def is_native(*arrays: np.ndarray) -> bool:
    """Say whether native kernels take arrays of such a type; they are to be contiguous then."""
    return arrays[0].dtype in _NATIVE and all(each.size for each in arrays)


def located(error: UsageError, name: str, line: str, part: str) -> UsageError:
    """Say where in the user's program, and in which layer, a kernel refused its inputs."""
    return reworded(error, f"{line}: {f'{describe_part(part)}: ' if part else ''}{name}: {error}")


def cut(gradient: Any, output: Any, inputs: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """The gradient of an op that is constant almost everywhere: nothing flows back through it."""
    return [None] * len(inputs)


_TABLE: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add a row.

    Raises:
        InternalError: The name is taken.
    """
    if op.name in _TABLE:
        raise InternalError(f"operator {op.name!r} is registered twice")
    _TABLE[op.name] = op
    return op


def lookup(name: str) -> Op:
    """Return a row by name.

    Raises:
        UsageError: There is no such operator; the message suggests the nearest.
    """
    try:
        return _TABLE[name]
    except KeyError:
        raise unknown_name("operator", name, _TABLE) from None


def names() -> tuple[str, ...]:
    """List all operators."""
    return tuple(_TABLE)
