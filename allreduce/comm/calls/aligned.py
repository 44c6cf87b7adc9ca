"""Ordinary memory for transports whose members share none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64  # bytes: a cache line


def aligned(nbytes: int) -> NDArray[np.uint8] | None:
    """Allocate zeros that begin with a cache line; None where there is no room for them."""
    try:
        memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError):  # the latter where an address cannot say so much
        return None
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + nbytes]
