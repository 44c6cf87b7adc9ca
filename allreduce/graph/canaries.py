"""Bytes around a value that show who writes there: `ar.config.enable_sync_errors()`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from allreduce.devices import options
from allreduce.devices.base import ALIGNMENT
from allreduce.errors import UsageError

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

    def given(self, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Give what the kernel reads, so that it cannot write there either."""
        return inputs if self._canaries is None else [unwritable(each) for each in inputs]

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


def unwritable(array: np.ndarray) -> np.ndarray:
    """Give a view of an array through which NumPy does not write."""
    view = array.view()
    view.flags.writeable = False
    return view
