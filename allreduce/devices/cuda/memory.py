"""Pools of memory: what is freed is kept for the next block of its size.

Allocating and freeing memory waits for the whole device. In the steady state steps do neither.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from allreduce.devices.cuda.driver import CudaError, api, call
from allreduce.errors import OutOfMemoryError

_STEP = 512  # bytes: what CUDA aligns memory to
_LARGE = 1 << 20  # bytes; above, sizes are multiples of this
# Bytes: smaller blocks are cut from slabs, of which a step of any kind finds enough.
_SMALL, _SLAB = 1 << 14, 1 << 20
_WASTE = 4  # an idle block that is so many times as large is better than a new one


def rounded(nbytes: int) -> int:
    """Round a size up to that of a block, so that similar sizes share blocks."""
    step = _STEP if nbytes <= _LARGE else _LARGE
    return max(step, -(-nbytes // step) * step)


class Awaited(Protocol):
    """An event behind which memory may be used again."""

    def done(self) -> bool: ...


# Returns the event of the last use of a block that is released; None if it may be used at once.
LastUse = Callable[[], Awaited | None]


class Block:
    """A piece of memory, which goes back to its pool when nothing refers to it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = ""  # the name of the logical device that took it


class Pool:
    """Memory blocks by size.

    Args:
        take: Allocates so many bytes; returns the address.
        free: Frees what an address is the start of.

    Attributes:
        nbytes: Bytes of all blocks, in use or not.
    """

    def __init__(self, take: Callable[[int], int], free: Callable[[int], None]) -> None:
        self._take, self._free = take, free
        self._lock = threading.RLock()  # a finalizer may run in the middle of an allocation
        self._idle: dict[int, list[int]] = {}
        self._in_use: list[tuple[Awaited, int, int]] = []  # released blocks, until their events
        self._slabs: list[int] = []
        self.nbytes = 0

    def block(self, nbytes: int, last_use: LastUse | None = None) -> Block:
        """Return a block of at least so many bytes.

        Args:
            nbytes: The number of bytes.
            last_use: Called when the block is released; by default it is not in use then.

        Raises:
            OutOfMemoryError: There is no memory, also after freeing unused blocks.
        """
        size = rounded(nbytes)
        with self._lock:
            self._collect()
            size = next((each for each in self._fitting(size) if self._idle.get(each)), size)
            idle = self._idle.get(size)
            address = idle.pop() if idle else self._fresh(size)
        made = Block(address, size)
        weakref.finalize(made, self._put_back, address, size, last_use).atexit = False
        return made

    def _collect(self) -> None:
        """Take back released blocks whose last use is over."""
        for entry in [each for each in self._in_use if each[0].done()]:
            self._in_use.remove(entry)
            self._idle.setdefault(entry[2], []).append(entry[1])

    def _fitting(self, size: int) -> list[int]:
        """List the sizes of blocks that may serve for one, best first: none is much larger."""
        return [size, *sorted(each for each in list(self._idle) if size < each <= _WASTE * size)]

    def _fresh(self, size: int) -> int:
        if size > _SMALL:
            return self._taken(size)
        start = self._taken(_SLAB)
        self._slabs.append(start)
        cut = range(start, start + _SLAB // size * size, size)
        self._idle.setdefault(size, []).extend(cut[1:])
        return start

    def _taken(self, size: int) -> int:
        try:
            address = self._take(size)
        except OutOfMemoryError:
            self.trim()
            address = self._take(size)
        self.nbytes += size
        return address

    def _put_back(self, address: int, size: int, last_use: LastUse | None) -> None:
        try:
            event = None if last_use is None else last_use()
        except (CudaError, OutOfMemoryError):  # of a lost GPU, for one: nobody needs its memory
            return
        with self._lock:
            if event is None:
                self._idle.setdefault(size, []).append(address)
            else:
                self._in_use.append((event, address, size))

    def trim(self) -> None:
        """Free the blocks that are not in use; the slabs of small blocks stay."""
        with self._lock:
            for size, addresses in list(self._idle.items()):  # blocks may be released meanwhile
                while addresses and size > _SMALL:
                    self._free(addresses.pop())
                    self.nbytes -= size


def device_pool(enter: Callable[[], None]) -> Pool:
    """Make the pool of a device; `enter` makes its context current."""

    def take(size: int) -> int:
        enter()
        return int(call(api.cuMemAlloc, size))

    def free(address: int) -> None:
        enter()
        call(api.cuMemFree, address)

    return Pool(take, free)


class PinnedPool(Pool):
    """Host memory that a GPU copies from and to while the host goes on.

    Args:
        enter: Makes a context current.
    """

    def __init__(self, enter: Callable[[], None]) -> None:
        def take(size: int) -> int:
            enter()
            try:
                # Portable: every context of the process may use it.
                return int(call(api.cuMemHostAlloc, size, api.CU_MEMHOSTALLOC_PORTABLE))
            except OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"the host cannot pin {size} bytes of memory for copies from and to GPUs: use "
                    "smaller batches, or fewer processes on this host"
                ) from error

        super().__init__(take, lambda address: call(api.cuMemFreeHost, address))

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return an array in pinned memory, which is free again when nothing refers to it."""
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        block = self.block(max(nbytes, 1))
        return np.asarray(_Memory(block, nbytes)).view(kind).reshape(shape)


class _Memory:
    """Offers a block's bytes to NumPy, and keeps it alive."""

    def __init__(self, block: Block, nbytes: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }
