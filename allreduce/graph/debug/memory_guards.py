"""Detect kernels that write outside their output: `ar.config.enable_sync_errors()`.

Guard bytes surround the output, and checksums protect the inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from allreduce.devices import options
from allreduce.devices.base import ALIGNMENT
from allreduce.errors import UsageError
from allreduce.graph.core.op_table import Attrs, Kernel, Op, located
from allreduce.graph.debug import numerics

GUARD = 4 * ALIGNMENT  # bytes on each side
_PATTERN = 0xA5


class MemoryGuards:
    """The guard bytes at both ends of some memory.

    Args:
        memory: The memory as flat bytes, with `GUARD` guard bytes at each end.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._ends = memory[:GUARD], memory[-GUARD:]
        for each in self._ends:
            each.fill(_PATTERN)

    @property
    def intact(self) -> bool:
        """Whether the guard bytes are unchanged."""
        return all(bool((each == _PATTERN).all()) for each in self._ends)


def run_now(
    op: Op,
    inputs: Sequence[np.ndarray],
    attrs: Attrs,
    output: tuple[tuple[int, ...], np.dtype[Any]],
    where: Callable[[], tuple[str, str, str]],
) -> np.ndarray:
    """Run an operator's CPU kernel outside of a program, with the checks that are on.

    Args:
        output: The shape and dtype of the value.
        where: Returns the user's line, the part of the model, and the replica and step.

    Raises:
        UsageError: The kernel refuses its inputs, or has written outside its output.
        NumericsError: The value is not finite.
    """
    assert op.cpu is not None, op.name
    (shape, dtype), kernel, guards = output, op.cpu, None
    if options.current().sync_errors:
        memory = np.empty(prod(shape) * dtype.itemsize + 2 * GUARD, np.uint8)
        guards, kernel = MemoryGuards(memory), watched_inputs(op, op.cpu)
        out = memory[GUARD:-GUARD].view(dtype).reshape(shape)
    else:
        out = np.empty(shape, dtype)
    with np.errstate(all="ignore"):  # infinities and NaN are results here, not warnings
        try:
            kernel(out, inputs, attrs)
        except UsageError as error:
            line, part, _ = where()
            raise located(error, op.name, line, part) from None
    if guards is not None and not guards.intact:
        raise beside(op.name, where()[0], f"{dtype} {shape}")
    if options.current().check_numerics:
        line, _, when = where()
        numerics.check(op.name, line, out, inputs, when)
    return out


def beside(op: str, source: str, output: str) -> UsageError:
    """Return the error for a kernel that has written outside its output."""
    return UsageError(
        f"{source}: the kernel of operator {op!r} has written before or behind its output, "
        f"{output}; it must write only that"
    )


def watched_inputs(op: Op, kernel: Kernel) -> Kernel:
    """Return a kernel that raises an error if it writes to its inputs.

    NumPy respects read-only views. Native code may not, so the inputs of a user's kernel are
    checksummed before and after.
    """

    def run(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
        before = [_checksum(each) for each in inputs] if op.users else []
        kernel(out, [_unwritable(each) for each in inputs], attrs)
        for place, was in enumerate(before):
            if _checksum(inputs[place]) != was:
                x = inputs[place]
                raise UsageError(
                    f"the kernel of operator {op.name!r} has changed its input {place}, {x.dtype} "
                    f"{x.shape}; it must write only its output"
                )

    return run


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _unwritable(array: np.ndarray) -> np.ndarray:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view
