"""What a step returns from devices whose memory the host cannot read: copies that are under way.

The step has issued them and gone on. Who reads one waits for it, and nobody else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce.devices import Event


class Fetched:
    """An array in the host's memory that a device writes.

    Args:
        array: Where it goes.
        event: When it is there.
    """

    __slots__ = ("_array", "_event")

    def __init__(self, array: np.ndarray, event: Event) -> None:
        self._array = array
        self._event = event

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    def wait(self) -> np.ndarray:
        """Wait until it is there; returns it."""
        self._event.synchronize()
        return self._array


# What a step returns: on CPUs an array.
Output = np.ndarray | Fetched


def arrived(output: Output) -> np.ndarray:
    """Return an output's array, once it is there."""
    return output.wait() if isinstance(output, Fetched) else output
