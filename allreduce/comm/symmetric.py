"""Symmetric memory: one part per member, in a region that all of them map."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm import memory
from allreduce.comm.call import COUNT_LIMIT, kind
from allreduce.comm.local_group import LocalGroup
from allreduce.errors import OutOfMemoryError

_PAGE = 4096


class Symmetric:
    """One member's side of the allocations of a communicator."""

    def __init__(
        self, local: LocalGroup, member: _native.Member, index: int, timeout: float
    ) -> None:
        self._local = local
        self._member = member
        self._index = index
        self._timeout = timeout
        self._where = f"[shared] {local.members[index]}"
        self._regions = 0

    def allocate(self, nbytes: int, complete: Callable[[_native.Work], None]) -> NDArray[np.uint8]:
        """Return this member's part; a collective call of the members.

        Args:
            nbytes: The size of a part.
            complete: Waits for a started work.

        Raises:
            OutOfMemoryError: A process cannot have the memory; raised on all members.
        """
        pages = max(1, -(-nbytes // _PAGE))
        if pages >= COUNT_LIMIT:
            raise OutOfMemoryError(f"{self._where}: no machine has {nbytes} bytes")
        complete(self._member.start_allocate(pages))
        self._regions += 1
        error = self._map(self._regions, pages * _PAGE)
        # Everybody learns whether everybody could map it.
        mine, errors = np.array([error]), np.zeros(len(self._local.members), np.int64)
        complete(self._member.start(kind("all_gather"), mine, errors))
        if errors.any():
            self._local.group.release_region(self._regions)
            raise self._shortage(nbytes, errors)
        part: NDArray[np.uint8] = self._local.group.claim(self._regions, self._index)
        return part

    def _map(self, region: int, part_bytes: int) -> int:
        """Have this process's first member map a new region; return an errno value or 0."""
        local = self._local
        if self._index != local.first:
            return 0
        total = part_bytes * len(local.members)
        fd, error = None, 0
        try:
            if not local.links.sockets:
                memory.check_available(total)
            elif local.links.rank == 0:
                fd = memory.allocate(total)
        except OSError as failure:
            error = failure.errno or errno.ENOMEM
        try:
            if local.links.sockets:
                fd, error = local.links.pass_file(fd, error, time.monotonic() + self._timeout)
            if error == 0:
                local.group.map_region(
                    region, -1 if fd is None else fd, part_bytes, local.local_members
                )
        except OSError as failure:
            error = failure.errno or errno.ENOMEM
        finally:
            if fd is not None:
                os.close(fd)
        return error

    def _shortage(self, nbytes: int, errors: NDArray[np.int64]) -> OutOfMemoryError:
        first = int(np.flatnonzero(errors)[0])
        total = nbytes * len(errors)
        return OutOfMemoryError(
            f"{self._where}: no shared memory of {total} bytes, {nbytes} per member: "
            f"{self._local.members[first]} got {os.strerror(int(errors[first]))!r}; "
            f"about {memory.available_bytes()} bytes are free on this machine"
        )
