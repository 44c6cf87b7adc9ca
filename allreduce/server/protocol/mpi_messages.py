"""Large arrays between tasks that are ranks of one MPI job, as messages of MPI.

On a fabric with RDMA, MPI is the way to it; data connections carry everything else.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from allreduce.errors import UnsupportedError

SMALLEST = 1 << 16  # bytes of an array that is worth a message of its own
_CHUNK = 1 << 30  # bytes of one message: MPI-3 counts with 31 bits
TAGS = 1 << 15  # that every MPI has


class MpiMessages:
    """This rank's end; its construction is a collective call of all ranks of the job.

    Messages of a connection have its tag, so that one which an earlier connection of the same two
    ranks left behind is not taken for theirs.

    Attributes:
        rank: This task's rank.
        job: The job's identity; ranks of other jobs have another one.

    Raises:
        UnsupportedError: MPI cannot be called from several threads.
    """

    def __init__(self) -> None:
        mpi = _initialized()
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise UnsupportedError(
                "[server] this MPI cannot be called from several threads, which tensors need; "
                "leave ALLREDUCE_TRANSPORT=mpi out"
            )
        self._communicator = mpi.COMM_WORLD.Dup()
        self._bytes = mpi.BYTE
        self.rank = int(self._communicator.Get_rank())
        self.job = str(self._communicator.bcast(secrets.token_hex(8), root=0))

    def send(self, array: np.ndarray, rank: int, tag: int) -> None:
        """Send a contiguous array's bytes to a rank; returns when the array may change."""
        for part in _chunks(array):
            self._communicator.Send([part, self._bytes], dest=rank, tag=tag)

    def receive(self, array: np.ndarray, rank: int, tag: int) -> None:
        """Fill a contiguous array with what a rank sends."""
        for part in _chunks(array):
            self._communicator.Recv([part, self._bytes], source=rank, tag=tag)


def _initialized() -> Any:
    """Import mpi4py, which initialises MPI, and ends it when the process ends.

    Raises:
        UnsupportedError: It is not installed, or finds no MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"[server] ALLREDUCE_TRANSPORT=mpi needs mpi4py and an MPI: {error}"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _chunks(array: np.ndarray) -> list[np.ndarray]:
    whole = array.reshape(-1).view(np.uint8)
    return [whole[first : first + _CHUNK] for first in range(0, len(whole), _CHUNK)]
