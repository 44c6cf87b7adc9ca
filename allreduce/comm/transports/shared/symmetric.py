"""Symmetric memory: one part per member, in a region that all members map."""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm.calls.call import COUNT_LIMIT, PAGE, kind
from allreduce.comm.transports.shared import memory
from allreduce.comm.transports.shared.links import LocalGroup
from allreduce.errors import OutOfMemoryError

RunCall = Callable[[Callable[[], _native.Work]], None]

_TEXT_WORDS = 63  # 504 bytes for an error, which may contain a long path


class Symmetric:
    """Allocates one member's parts of symmetric memory."""

    def __init__(
        self, local: LocalGroup, member: _native.Member, index: int, where: str, timeout: float
    ) -> None:
        self._local = local
        self._member = member
        self._index = index
        self._timeout = timeout
        self._where = f"{where}: empty"
        self._regions = 0

    def allocate(self, nbytes: int, run_call: RunCall) -> NDArray[np.uint8]:
        """Return this member's part; a collective call of the members.

        Raises:
            OutOfMemoryError: A process lacks the memory; raised on all members.
        """
        pages = max(1, -(-nbytes // PAGE))
        if pages >= COUNT_LIMIT:
            raise OutOfMemoryError(
                f"{self._where}: {nbytes} bytes exceed any machine's memory; ask for less"
            )
        run_call(functools.partial(self._member.start_allocate, pages))
        # Allocating pages takes long, so first check that all processes can map them.
        self._share_outcome(nbytes, self._check(pages * PAGE), run_call)
        self._regions += 1
        try:
            self._share_outcome(nbytes, self._map(self._regions, pages * PAGE), run_call)
        except OutOfMemoryError:
            self._local.group.release_region(self._regions)
            raise
        part: NDArray[np.uint8] = self._local.group.claim(self._regions, self._index)
        return part

    def _share_outcome(self, nbytes: int, found: tuple[int, str], run_call: RunCall) -> None:
        """Exchange the outcomes of all processes.

        Raises:
            OutOfMemoryError: A process failed; raised on all members.
        """
        mine = _report(*found)
        reports = np.zeros((len(self._local.members), len(mine)), np.int64)
        words = reports.reshape(-1)
        run_call(functools.partial(self._member.start, kind("all_gather"), mine, words))
        if reports[:, 0].any():
            raise self._shortage(nbytes, reports)

    def _check(self, part_bytes: int) -> tuple[int, str]:
        """Check on this process's first member whether a new region can be mapped here.

        Returns:
            As `_map`.
        """
        local = self._local
        if self._index != local.first:
            return 0, ""
        total = part_bytes * len(local.members)
        try:
            if local.links.rank == 0:
                needed = total + memory.page_tables(total, len(local.links.processes))
                memory.check_available(needed)
            memory.check_mappable(total)
        except OSError as failure:
            return failure.errno or errno.ENOMEM, failure.strerror or ""
        return 0, ""

    def _map(self, region: int, part_bytes: int) -> tuple[int, str]:
        """Map a new region on this process's first member.

        Returns:
            0 and an empty text, or an errno value and its cause.
        """
        local = self._local
        if self._index != local.first:
            return 0, ""
        fd, error, why = None, 0, ""
        try:
            if local.links.rank == 0 and local.links.sockets:
                # One file for all members' parts; the kernel charges it to the first process.
                fd = memory.allocate(part_bytes * len(local.members))
        except OSError as failure:
            error, why = failure.errno or errno.ENOMEM, failure.strerror or ""
        try:
            if local.links.sockets:
                fd, error = local.links.pass_file(fd, error, time.monotonic() + self._timeout)
            if error == 0:
                local.group.map_region(
                    region, -1 if fd is None else fd, part_bytes, local.local_members
                )
        except OSError as failure:
            error, why = failure.errno or errno.ENOMEM, failure.strerror or ""
        finally:
            if fd is not None:
                os.close(fd)
        return error, why

    def _shortage(self, nbytes: int, reports: NDArray[np.int64]) -> OutOfMemoryError:
        first = int(np.flatnonzero(reports[:, 0])[0])
        error = os.strerror(int(reports[first, 0]))
        why = reports[first, 1:].tobytes().rstrip(b"\0").decode(errors="replace")
        return OutOfMemoryError(
            f"{self._where}: no shared memory of {nbytes * len(reports)} bytes, {nbytes} per "
            f"member: {self._local.members[first]} got {error!r}"
            + (f": {why}" if why and why != error else "")
            + "; ask for less on every rank, or run fewer ranks on this host"
        )


def _report(error: int, why: str) -> NDArray[np.int64]:
    """Pack an errno value and its cause for the other members."""
    size = _TEXT_WORDS * 8
    text = np.frombuffer(why.encode()[:size].ljust(size, b"\0"), np.int64)
    return np.concatenate([np.array([error], np.int64), text])
