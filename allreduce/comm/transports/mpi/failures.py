"""Record and report why a communicator over MPI ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from allreduce.comm.failures.reporter import build_error, dead
from allreduce.comm.transports.mpi.request_queue import MpiWork, RequestQueue
from allreduce.comm.transports.mpi.status_board import Notice, StatusBoard
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    Finding,
    OutOfMemoryError,
    is_interrupt,
    reworded,
)


class FailureState:
    """Why one member's communicator ended, if it has."""

    def __init__(
        self, mpi: Any, where: str, rank: int, board: StatusBoard, queue: RequestQueue
    ) -> None:
        self._mpi, self._where, self._rank = mpi, where, rank
        self._board, self._queue = board, queue
        self.failure: AllreduceError | None = None
        self._mismatched: MpiWork | None = None
        self._raised = False

    @property
    def failed(self) -> bool:
        """Whether the communicator is dead."""
        return self.failure is not None or self._mismatched is not None

    def check(self) -> None:
        """Raise the error that ended the communicator; later calls raise `ClosedError`."""
        if self.failure is None and self._mismatched is not None:
            self.failure = self._board.mismatch_error(self._where, self._mismatched.seq)
        if self.failure is None:
            return
        if self._raised:
            raise dead(self._where, str(self.failure), self.failure.finding)
        self._raised = True
        raise self.failure

    def fail(self, error: AllreduceError, report: Finding | None = None) -> None:
        """End the communicator, and report `report` to the others if it is given."""
        if not self.failed:
            self.failure = error
            if report is not None:
                self.announce(report)

    def announce(self, finding: Finding) -> None:
        """Tell the others of this member's end."""
        text, interrupted = str(finding), finding.interrupted
        calls = self._queue.completed
        self._board.post_end(Notice(finding.fault, self._rank, calls, text, interrupted))

    def abort(self, reason: str, interrupted: bool) -> None:
        """End the communicator on all members, without waiting for the cause."""
        error = ClosedError(f"{self._where}: this member aborted it: {reason}")
        error.finding = Finding("aborted", reason, interrupted=interrupted)
        self.fail(error, error.finding)
        self._raised = True

    def mismatch(self, work: MpiWork) -> None:
        """Make the communicator dead because members disagree on a call."""
        self._mismatched = work
        self._board.post_call(work.seq, work.call, work.note, int(work.mark))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """End the communicator if the block raises in the middle of a change to its calls."""
        try:
            yield
        except OutOfMemoryError as error:
            shortage = OutOfMemoryError(f"{self._where}: {error}")
            shortage.finding = Finding("aborted", str(error))
            self.fail(shortage, shortage.finding)
        except AllreduceError as error:
            raised = reworded(error, f"{self._where}: {error}")
            raised.__cause__ = error  # it is raised by another call
            raised.finding = Finding("mismatch", str(error))
            self.fail(raised, raised.finding)
        except self._mpi.Exception as error:
            text = f"MPI failed, as after the loss of a rank or of a network: {error}"
            finding = Finding("aborted", text)
            self.fail(build_error(self._where, finding), finding)
        except BaseException as error:  # a signal's handler raised
            reason = f"a call was interrupted by {type(error).__name__}"
            self.abort(reason, is_interrupt(error))
            raise
