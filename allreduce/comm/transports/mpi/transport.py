"""The transport over MPI: its non-blocking collectives, on communicators of our own.

Members first agree on a call: a reduction of its signature, which nobody passes before all have
made the call. Only then are arrays touched. A thread that waits drives this process's share of all
started calls, in the order of their start; MPI itself is entered by one thread at a time. The
reason for the end of a communicator travels through the world's store (status_board.py).

Sums are equal on all members, but MPI chooses the order of their terms: they may differ in the last
bits from those of other transports, of other sizes and of other MPI libraries. Whether minima and
maxima pass NaN on is MPI's choice, too.

A rank that dies under MPI's own launcher takes the job with it: mpirun kills the survivors by
itself (MPICH's and Intel MPI's at once, Open MPI's after a message), so that they raise nothing.
If it is configured not to, waiting members raise PeerLostError once the world's leader has noticed
the death.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allreduce.cluster import LeaderLeftError, World
from allreduce.comm.calls import call_site
from allreduce.comm.calls.call import MESSAGES, Array, Call
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core import progress
from allreduce.comm.core.transport import LevelTransport, aligned
from allreduce.comm.failures.reporter import ORDERED, build_error, group_text
from allreduce.comm.transports.mpi import mpi_progress
from allreduce.comm.transports.mpi.calls import Collective
from allreduce.comm.transports.mpi.converted import plan_mpi
from allreduce.comm.transports.mpi.failures import FailureState
from allreduce.comm.transports.mpi.messages import Message
from allreduce.comm.transports.mpi.mpi_progress import entered
from allreduce.comm.transports.mpi.request_queue import MpiWork, RequestQueue
from allreduce.comm.transports.mpi.status_board import StatusBoard
from allreduce.comm.transports.mpi.types import Library
from allreduce.comm.transports.mpi.wait_monitor import WaitMonitor
from allreduce.errors import ClosedError, Finding, OutOfMemoryError, UsageError


class Admission:
    """Checks before a thread enters MPI."""

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
        """Refuse callers that may not enter MPI, and all callers once MPI has ended.

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


_SPINS = 200  # polls before a waiter yields: about the duration of a small call
_YIELD_SECONDS = 0.05  # how long a waiter for the others' calls only yields
_NAP_SECONDS = 0.001


class MpiTransport(LevelTransport):
    """One member of a communicator whose members talk through MPI.

    Args:
        data: The mpi4py communicator for data; the transport frees it.
        control: One of the same members, for agreements.
        world: The members, in the same order.
        board: The status of members, under the communicator's name.
    """

    name = "mpi"
    wait_priority, closes_together = 2, True

    def __init__(
        self,
        library: Library,
        data: Any,
        control: Any,
        world: World,
        board: StatusBoard,
        timeout: float,
    ) -> None:
        self._library, self._mpi = library, library.mpi
        self._data, self._control = data, control
        self.index, self._group, self._timeout = world.rank, board.name, timeout
        self._members = tuple(
            MemberInfo(index, member.world_rank, member.pid, replicated=False)
            for index, member in enumerate(world.members)
        )
        self._where = f"[mpi] {group_text(board.name)}{world.called()}"
        self._board = board
        self._admission = Admission(self._mpi, self._where)
        self.any_thread = self._admission.any_thread
        self._queue = RequestQueue(self._mpi, control)
        self._failure_state = FailureState(self._mpi, self._where, self.index, board, self._queue)
        self._closed = self._leaving = False
        self._closing = threading.Lock()
        mpi_progress.add(self)
        mpi_progress.start_poller(library.mpi)

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        return self._members

    def admit(self) -> None:
        self._admission.admit()

    def rename(self, members: tuple[MemberInfo, ...]) -> None:
        self._members = members

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> MpiWork:
        self._check_usable()
        if call.collective not in MESSAGES:
            task = Collective(self._library, self._data, call, x, out, self._where)
            return self._begin(task, result, False)
        array = x if call.collective == "send" else out
        assert array is not None, "send has an input, recv an output"
        note = call_site.note(array, None)
        message = Message(self._library, self._data, call, array, self._where, note)
        work = MpiWork(self, call, message, result, note)
        with entered, self._failure_state.guard():
            self._queue.begin_message(work)
        self._check()
        return work

    def _begin(self, task: Collective, result: Callable[[], Any], flag: bool) -> MpiWork:
        work = MpiWork(self, task.call, task, result, call_site.note(task.x, task.out))
        with entered, self._failure_state.guard():
            self._queue.begin(work, flag)
        self._check()
        return work

    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:  # noqa: ARG002
        return plan_mpi(call, len(self._members))

    def poll(self, work: MpiWork) -> bool:
        """Advance all calls and return whether the work is complete; raise if it has failed."""
        self._admission.check()
        if work.complete:  # and the communicator may have died of a later call
            return True
        self._check()
        mpi_progress.drive()
        if not work.complete:
            self._check()
        return work.complete

    def look(self, work: MpiWork) -> bool:
        """Like `poll`, but raise no failures; the caller has passed `admit`."""
        if not self._admission.over:
            mpi_progress.drive()
        return work.complete

    def ask(self, work: MpiWork) -> bool:
        """As `poll`; one that only asks hears how the others end, too."""
        if self._board.quiet:  # the larger communicator drives and monitors its levels
            return self.poll(work)
        progress.make_progress()
        if self.poll(work):
            return True
        if work.monitor is None:
            work.monitor = WaitMonitor(self._board, self._where, work.seq, work.call, 0.0)
        self._check_others(work.monitor)
        return False

    def complete(self, work: MpiWork, timeout: float | None) -> None:
        """Wait for a work.

        Args:
            timeout: Seconds from now, or None for the transport's own.
        """
        total = self._timeout if timeout is None else timeout
        polls = 0
        monitor = WaitMonitor(self._board, self._where, work.seq, work.call, total)
        with self.uninterrupted():
            while not self.poll(work):
                polls += 1
                if polls < _SPINS:
                    continue
                progress.make_progress()
                waited = monitor.waited
                monitor.arrived, monitor.last = work.met, self._queue.last
                if waited >= total and not self.poll(work):
                    self._expire(monitor)
                self._check_others(monitor)
                time.sleep(
                    _NAP_SECONDS if waited > _YIELD_SECONDS and not mpi_progress.moving() else 0
                )
            monitor.end()

    def _check_others(self, monitor: WaitMonitor) -> None:
        error = monitor.check_if_due()
        if error is not None:
            self._failure_state.fail(error)

    def _expire(self, monitor: WaitMonitor) -> None:
        """Give a work up, unless another member has done so already."""
        error = monitor.check()
        if error is not None:
            self._failure_state.fail(error)
        else:
            text = monitor.timeout_text()
            report = Finding("timeout", f"{self._board.world.called()} {text}")
            self._failure_state.fail(build_error(self._where, Finding("timeout", text)), report)
        self._check()

    def _check_usable(self) -> None:
        """Refuse threads and processes that must not call MPI, and ends that forbid it."""
        self._admission.check()
        self._check()

    def _check(self) -> None:
        """Raise why there is no communicator any more, if there is none."""
        if self._closed:
            raise ClosedError(f"{self._where}: the communicator is closed")
        self._failure_state.check()

    def advance(self) -> None:
        """Advance this communicator's calls; the caller holds MPI's lock."""
        with self._failure_state.guard():
            work = self._queue.advance()
            if work is not None:
                self._failure_state.mismatch(work)

    @property
    def admits(self) -> bool:
        """Whether this thread may call MPI now."""
        return self._admission.open_here

    @property
    def moving(self) -> bool:
        """Whether bytes are on their way, which advance with our polls only."""
        return self._queue.moving

    @property
    def busy(self) -> bool:
        """Whether there are started calls, which advance only when polled.

        Without any it is not driven, so that an interrupted wait on another communicator cannot
        stop in the middle of its calls.
        """
        return not (self._queue.idle or self._failure_state.failed or self._closed)

    @property
    def dead(self) -> bool:
        return self._failure_state.failed

    def check_alive(self) -> None:
        self._check()
        try:
            notice = self._board.latest_end()
        except LeaderLeftError:  # there are no more reports, but MPI may go on
            return
        if notice is not None and notice.kind != "left":
            member = self._board.world.called(notice.rank)
            self._failure_state.fail(notice.error(self._where, "no call", member, ORDERED))
            self._check()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        self._check_usable()
        call = Call("empty", None, "bytes", nbytes, None, self._group)
        memory = aligned(nbytes)
        task = Collective(self._library, self._data, call, None, None, self._where)
        work = self._begin(task, lambda: None, memory is None)
        work.wait()
        if memory is None or work.words[2]:
            where = "this rank" if memory is None else "another rank"
            raise OutOfMemoryError(
                f"{self._where}: empty: {where} has no {nbytes} bytes; ask for less on every rank"
            )
        return memory

    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        if self._admission.inherited:
            return
        self._failure_state.abort(reason, interrupted)

    def close(self, drain: bool) -> None:
        if self._admission.inherited:
            return
        mine = False
        try:
            with self._closing:  # several threads may close, but one does
                if self._leaving:
                    return
                mine = self._leaving = True
            if drain and self._failure_state.failure is None:
                for work in self._queue.works:
                    if not work.complete and not work.awaited_elsewhere():
                        self.complete(work, None)
        finally:  # no other thread does it any more, even if a signal handler interrupted this one
            if mine:
                self._leave()

    def close_inherited(self) -> None:
        """Do nothing: a child made by fork must not touch MPI."""

    def _leave(self) -> None:
        """Free the communicators if they have no calls left; otherwise keep what MPI may touch."""
        if self._failure_state.failure is None:
            self._failure_state.announce(Finding("left", ""))
        with entered:
            self._closed = True
            unfinished = bool(self._queue.works) or self._failure_state.failure is not None
            mpi_progress.remove(self, unfinished)
            if not unfinished and self._admission.open_here:
                self._data.Free()  # a local matter once nothing is left in it
                self._control.Free()
