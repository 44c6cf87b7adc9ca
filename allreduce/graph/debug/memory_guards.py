"""Detect kernels that write outside their output: `ar.config.enable_sync_errors()`.

Guard bytes surround the output, and checksums protect the inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from allreduce.devices import options
from allreduce.devices.base import ALIGNMENT
from allreduce.errors import UsageError
from allreduce.graph.core.op_table import Attrs, Kernel, Op

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


class KernelOutput:
    """New memory for a kernel's output, with guard bytes if `enable_sync_errors` is on.

    Attributes:
        array: The output; uninitialized at first.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._guards: MemoryGuards | None = None
        if options.current().sync_errors:
            memory = np.empty(prod(shape) * dtype.itemsize + 2 * GUARD, np.uint8)
            self._guards = MemoryGuards(memory)
            self.array = memory[GUARD:-GUARD].view(dtype).reshape(shape)
        else:
            self.array = np.empty(shape, dtype)

    def fill(self, op: Op, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
        """Run an operator's CPU kernel into the output."""
        assert op.cpu is not None, op.name
        kernel = op.cpu if self._guards is None else watched_inputs(op, op.cpu)
        kernel(self.array, inputs, attrs)

    def check(self, op: str, source: str) -> None:
        """Check the guard bytes.

        Raises:
            UsageError: The kernel has written to them.
        """
        if self._guards is not None and not self._guards.intact:
            raise beside(op, source, f"{self.array.dtype} {self.array.shape}")


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
