"""Who may call MPI for a communicator: this process, while MPI lives, in threads that MPI takes."""

from __future__ import annotations

import os
from typing import Any

from allreduce.errors import ClosedError, UsageError


class Admission:
    """What is asked before MPI is entered.

    Args:
        mpi: MPI's module.
        where: "[mpi] rank 2", for messages.
    """

    def __init__(self, mpi: Any, where: str) -> None:
        self._mpi, self._where = mpi, where
        self.any_thread = bool(mpi.Query_thread() >= mpi.THREAD_SERIALIZED)
        self._pid = os.getpid()

    @property
    def inherited(self) -> bool:
        """Whether this process was made by fork, from the one that joined."""
        return os.getpid() != self._pid

    @property
    def over(self) -> bool:
        """Whether MPI has ended in this process."""
        return bool(self._mpi.Is_finalized())

    @property
    def open_here(self) -> bool:
        """Whether MPI lives in this process, and takes calls of this thread."""
        return not self.inherited and not self.over and self._takes_this_thread

    @property
    def _takes_this_thread(self) -> bool:
        return self.any_thread or bool(self._mpi.Is_thread_main())

    def check(self) -> None:
        """Refuse all if MPI has ended, and who must not call it.

        Raises:
            UsageError: As for `admit`.
            ClosedError: MPI has ended.
        """
        self.admit()
        if self.over:
            raise ClosedError(
                f"{self._where}: this process has finalised MPI, and can call no more"
            )

    def admit(self) -> None:
        """Refuse threads and processes that must not call MPI.

        Raises:
            UsageError: It is not their MPI, or not initialised for them.
        """
        if self.inherited:
            raise UsageError(
                f"{self._where}: process {os.getpid()} was forked from the process that joined, "
                "and cannot use its communicator"
            )
        if not self.over and not self._takes_this_thread:
            raise UsageError(
                f"{self._where}: MPI was initialised for calls of the main thread only; initialise "
                "it with MPI.THREAD_MULTIPLE, or let allreduce.init() do so"
            )
