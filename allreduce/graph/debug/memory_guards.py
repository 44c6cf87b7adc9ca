"""What shows that a kernel writes where it is not to: `ar.config.enable_sync_errors()`.

Bytes around its output, and checksums of its inputs.
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
_CANARY = 0xA5


class Canaries:
    """The guarding bytes at both ends of some memory.

    Args:
        room: The memory, as flat bytes: `GUARD` of them at each end.
    """

    def __init__(self, room: np.ndarray) -> None:
        self._ends = room[:GUARD], room[-GUARD:]
        for each in self._ends:
            each.fill(_CANARY)

    @property
    def intact(self) -> bool:
        """Whether nobody has written there."""
        return all(bool((each == _CANARY).all()) for each in self._ends)


class Room:
    """New memory for one value of a kernel, which is guarded if that is wanted.

    Attributes:
        array: Where the value goes; it may hold anything.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._canaries: Canaries | None = None
        if options.current().sync_errors:
            room = np.empty(prod(shape) * dtype.itemsize + 2 * GUARD, np.uint8)
            self._canaries = Canaries(room)
            self.array = room[GUARD:-GUARD].view(dtype).reshape(shape)
        else:
            self.array = np.empty(shape, dtype)

    def fill(self, op: Op, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
        """Have an operator's kernel for CPUs write its value there."""
        assert op.cpu is not None, op.name
        kernel = op.cpu if self._canaries is None else watched_inputs(op, op.cpu)
        kernel(self.array, inputs, attrs)

    def check(self, op: str, source: str) -> None:
        """Look around the value that a kernel has made.

        Raises:
            UsageError: It has written there.
        """
        if self._canaries is not None and not self._canaries.intact:
            raise beside(op, source, f"{self.array.dtype} {self.array.shape}")


def beside(op: str, source: str, output: str) -> UsageError:
    """Build the error for a kernel that has written beside its output."""
    return UsageError(
        f"{source}: the kernel of operator {op!r} has written before or behind its output, "
        f"{output}; it has to write that alone"
    )


def watched_inputs(op: Op, kernel: Kernel) -> Kernel:
    """Return a kernel that does not write to its inputs, or says so.

    NumPy does not, as what it gets is marked. Native code does not look at marks: so what a user's
    reads is summed up before and after.
    """

    def run(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
        before = [_checksum(each) for each in inputs] if op.users else []
        kernel(out, [_unwritable(each) for each in inputs], attrs)
        for place, was in enumerate(before):
            if _checksum(inputs[place]) != was:
                x = inputs[place]
                raise UsageError(
                    f"the kernel of operator {op.name!r} has changed its input {place}, {x.dtype} "
                    f"{x.shape}; it has to write its output alone"
                )

    return run


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _unwritable(array: np.ndarray) -> np.ndarray:
    """Give a view of an array through which NumPy does not write."""
    view = array.view()
    view.flags.writeable = False
    return view
