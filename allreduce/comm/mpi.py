"""The transport over MPI: its non-blocking collectives, on communicators of our own.

Members first agree on a call: a reduction of its signature, which nobody passes before all have
made the call. Only then are arrays touched. A thread that waits drives this process's share of all
started calls, in the order of their start; MPI itself is entered by one thread at a time. What
kills a communicator is told through the world's store (mpi_news.py).

Sums are equal on all members, but MPI chooses the order of their terms: they may differ in the last
bits from those of other transports, of other sizes and of other MPI libraries. Whether minima and
maxima pass NaN on is MPI's choice, too.

A rank that dies under MPI's own launcher takes the job with it: mpirun kills the survivors by
itself (MPICH's and Intel MPI's at once, Open MPI's after a message), so that they raise nothing.
Where it is told not to, those who wait raise PeerLostError once the leader of the world has missed
the dead one.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.cluster import World, failed
from allreduce.comm import sites
from allreduce.comm.base import Array, Quick, Transport, Work
from allreduce.comm.call import Call, agreed_shape
from allreduce.comm.mpi_calls import Collective, Library
from allreduce.comm.mpi_messages import Message
from allreduce.comm.mpi_news import WARN_SECONDS, News, Notice, Vigil, signature
from allreduce.comm.plan import Plan, Topology
from allreduce.comm.plans import plan
from allreduce.comm.stored_choices import current
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    OutOfMemoryError,
    PeerLostError,
    TimeoutError,
    UsageError,
)

_SPINS = 200  # polls before a waiter yields: about what a small call takes
_YIELD_SECONDS = 0.05  # how long a waiter for the others' calls only yields
_NAP_SECONDS = 0.001
_LOOK_SECONDS = 0.25  # between looks at the news
_ALIGNMENT = 64  # bytes

entered = threading.Lock()  # held in MPI: not every library lets several threads in
_open: list[MpiTransport] = []
_abandoned: list[MpiTransport] = []  # dead with calls started: MPI may still write to their arrays


class MpiWork(Work):
    """A started call of the mpi transport; keeps its arrays alive."""

    def __init__(
        self,
        transport: MpiTransport,
        call: Call,
        seq: int,
        task: Collective | Message,
        result: Callable[[], Any],
        note: bytes = b"",
    ) -> None:
        self.call, self.seq, self.task, self.note = call, seq, task, note
        self.posted = self.complete = False
        self.agreement: Any = None  # the request that reduces these:
        self.mark = np.uint64(0)  # its signature
        self.words = np.zeros(3, np.uint64)  # signature, its complement, the task's flag
        self._transport = transport
        self._result = result

    @property
    def agreed(self) -> bool:
        """Whether all members' signatures are equal: then the largest is the smallest."""
        return bool(self.words[0] == ~self.words[1])

    def done(self) -> bool:
        return self.complete or self._transport.poll(self)

    def finish(self, timeout: float | None) -> Any:
        if not self.complete:
            self._transport.complete(self, timeout)
        return self._result()

    def origin(self) -> tuple[int, int]:
        assert isinstance(self.task, Message), "only a recv is asked for its source"
        assert self.task.found is not None, "it is complete"
        return self.task.found


class MpiTransport(Transport):
    """One member of a communicator whose members talk through MPI.

    Args:
        library: The MPI library.
        data: The mpi4py communicator for what calls carry; the transport frees it.
        control: One of the same members, for agreements.
        world: The members, in the same order.
        name: The communicator's, new in this world.
        timeout: Seconds that any wait may last.
    """

    name = "mpi"

    def __init__(
        self, library: Library, data: Any, control: Any, world: World, name: str, timeout: float
    ) -> None:
        self._library, self._mpi = library, library.mpi
        self._data, self._control = data, control
        self._rank, self._group, self._timeout = world.rank, name, timeout
        self._where = f"[mpi] rank {world.rank}"
        self._news = News(world, name)
        self._main_only = self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED
        self._pid = os.getpid()
        self._calls = self._completed = 0  # collective ones
        self._agreeing: deque[MpiWork] = deque()
        self._moving: deque[MpiWork] = deque()
        self._looking: list[MpiWork] = []  # receives that no message has been found for
        self._messages: list[MpiWork] = []
        self._disputed: MpiWork | None = None
        self._failure: AllreduceError | None = None
        self._raised = False
        self._closed = False
        self.quick_seconds = min(timeout, WARN_SECONDS)
        _open.append(self)

    def quick(self) -> Quick | None:
        return None

    def finish_quick(self, unfinished: object) -> None:
        raise AssertionError(f"there is no quick way that could have left {unfinished!r}")

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> MpiWork:
        self._check_usable()
        if call.collective not in ("send", "recv"):
            task = Collective(self._library, self._data, call, x, out, self._where)
            return self._begin(task, result, task.large)
        array = x if call.collective == "send" else out
        assert array is not None, "send has an input, recv an output"
        note = sites.note(array, None)
        message = Message(self._library, self._data, call, array, self._where, note)
        work = MpiWork(self, call, -1, message, result)
        with entered:
            if message.incoming:
                self._looking.append(work)
            else:
                message.send()
                self._messages.append(work)
        return work

    def _begin(self, task: Collective, result: Callable[[], Any], flag: bool) -> MpiWork:
        """Post the agreement on a collective call; it also tells if any member's `flag` is set."""
        note = sites.note(task.x, task.out)
        array = task.x if task.x is not None else task.out
        shape = () if array is None else agreed_shape(task.call, array.shape)
        with entered:
            work = MpiWork(self, task.call, self._calls, task, result, note)
            mine = np.uint64(signature(task.call, shape))
            work.words[:] = mine, ~mine, flag
            work.mark = mine
            buffer = [work.words, work.words.size, self._mpi.UINT64_T]
            work.agreement = self._control.Iallreduce(self._mpi.IN_PLACE, buffer, self._mpi.MAX)
            self._calls += 1
            self._agreeing.append(work)
        return work

    def poll(self, work: MpiWork) -> bool:
        """Do what can be done now, and say whether the work is complete; raise if it has failed."""
        self._check_usable()
        _drive()
        if not work.complete:
            self._check()
        return work.complete

    def complete(self, work: MpiWork, timeout: float | None) -> None:
        """Wait for a work.

        Args:
            work: The work.
            timeout: Seconds from now, or None for the transport's own.
        """
        total = self._timeout if timeout is None else timeout
        began, polls, looked = time.monotonic(), 0, 0.0
        vigil = Vigil(self._news, self._where, work.seq, work.call, total)
        try:
            while not self.poll(work):
                polls += 1
                if polls < _SPINS:
                    continue
                waited, vigil.arrived = time.monotonic() - began, work.posted
                if waited >= total and not self.poll(work):
                    self._expire(vigil)
                if waited - looked >= _LOOK_SECONDS:
                    looked, error = waited, vigil.look(waited)
                    if error is not None:
                        self._fail(error)
                time.sleep(_NAP_SECONDS if waited > _YIELD_SECONDS and not _moving() else 0)
        except AllreduceError:
            raise
        except BaseException as error:  # a signal's handler raised in the middle of a collective
            self.abort(f"a wait was interrupted by {type(error).__name__}")
            raise

    def _expire(self, vigil: Vigil) -> None:
        """Give a work up, unless another member has done so already."""
        error = vigil.look(vigil.seconds)
        if error is not None:
            self._fail(error)
        else:
            text = vigil.surrender()
            self._fail(TimeoutError(f"{self._where}: {text}"), "timeout", text)
        self._check()

    def _check_usable(self) -> None:
        """Refuse threads and processes that must not call MPI, and ends that forbid it."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self._where}: process {os.getpid()} was forked from the process that joined, "
                "and cannot use its communicator"
            )
        if self._mpi.Is_finalized():
            raise ClosedError(
                f"{self._where}: this process has finalised MPI, and can call no more"
            )
        if self._main_only and not self._mpi.Is_thread_main():
            raise UsageError(
                f"{self._where}: MPI was initialised for calls of the main thread only; initialise "
                "it with MPI.THREAD_MULTIPLE, or let allreduce.init() do so"
            )
        self._check()

    def _check(self) -> None:
        """Raise what killed the communicator: the cause first, then that it is dead."""
        if self._closed:
            raise ClosedError(f"{self._where}: the communicator is closed")
        if self._failure is None and self._disputed is not None:
            self._failure = self._news.settle(self._where, self._disputed.seq)
        if self._failure is None:
            return
        if self._raised:
            raise ClosedError(f"{self._where}: the communicator is dead since: {self._failure}")
        self._raised = True
        raise self._failure

    def _fail(self, error: AllreduceError, kind: str = "", text: str = "") -> None:
        """Make the communicator dead; with a `kind`, tell the others why."""
        if self._failure is None and self._disputed is None:
            self._failure = error
            if kind:
                self._news.tell(Notice(kind, self._rank, self._completed, text))

    def advance(self) -> None:
        """Do what can be done of this communicator's calls; the caller is alone in MPI."""
        if self._failure is not None or self._disputed is not None:
            return
        try:
            while self._agreeing and self._agreeing[0].agreement.Test():
                work = self._agreeing[0]
                if not work.agreed:
                    self._disputed = work
                    self._news.dispute(work.seq, work.call, work.note, int(work.mark))
                    return
                assert isinstance(work.task, Collective)
                work.task.post(simple=not work.words[2])
                work.posted = True
                self._moving.append(self._agreeing.popleft())
            while self._moving and self._moving[0].task.complete():
                self._moving.popleft().complete = True
                self._completed += 1
            self._advance_messages()
        except AllreduceError as error:
            self._fail(type(error)(f"{self._where}: {error}"), "mismatch", str(error))
        except self._mpi.Exception as error:
            text = f"MPI failed, as after the loss of a rank or of a network: {error}"
            self._fail(PeerLostError(f"{self._where}: {text}"), "aborted", text)

    @property
    def moving(self) -> bool:
        """Whether bytes are on their way, which advance with our polls only."""
        return bool(self._moving or self._messages)

    def _advance_messages(self) -> None:
        looking: list[Message] = []
        for work in list(self._looking):
            assert isinstance(work.task, Message)
            if work.task.look(looking):
                self._looking.remove(work)
                self._messages.append(work)
            else:
                looking.append(work.task)
        for work in self._messages:
            work.complete = work.task.complete()
        self._messages = [work for work in self._messages if not work.complete]

    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:  # noqa: ARG002
        size = self._data.Get_size()
        return plan(call, Topology(self.name, self._rank, size), current().choices("mpi", size))

    def progress(self) -> None:
        _drive()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        self._check_usable()
        call = Call("empty", None, "bytes", nbytes, None, self._group)
        try:
            memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):  # the latter where an address cannot say so much
            memory = None
        task = Collective(self._library, self._data, call, None, None, self._where)
        work = self._begin(task, lambda: None, memory is None)
        work.wait()
        if memory is None or work.words[2]:
            where = "this rank" if memory is None else "another rank"
            raise OutOfMemoryError(
                f"{self._where}: empty: {where} has no {nbytes} bytes; ask for less on every rank"
            )
        offset = -memory.ctypes.data % _ALIGNMENT
        return memory[offset : offset + nbytes]

    def abort(self, reason: str) -> None:
        text = f"this member aborted it: {reason}"
        self._fail(ClosedError(f"{self._where}: {text}"), "aborted", reason)
        self._raised = True

    def close(self, drain: bool) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        try:
            if drain and self._failure is None:
                for work in [*self._agreeing, *self._moving, *self._looking, *self._messages]:
                    if not work.complete:
                        self.complete(work, None)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Free the communicators if nothing is left in them; otherwise keep what MPI may touch."""
        if self._failure is None:
            self._news.tell(Notice("left", self._rank, self._completed, ""))
        with entered:
            self._closed = True
            _open.remove(self)
            if self._agreeing or self._moving or self._looking or self._messages or self._failure:
                _abandoned.append(self)
            elif not self._mpi.Is_finalized():
                self._data.Free()  # a local matter once nothing is left in it
                self._control.Free()


def _drive() -> None:
    """Perform this process's share of all started calls, over all communicators."""
    with entered:
        for transport in _open:
            transport.advance()
    _native.progress()


def _moving() -> bool:
    return any(transport.moving for transport in tuple(_open))


@atexit.register
def _leave_all() -> None:
    """Leave in good order at the program's end, or say that it ends with an error."""
    for transport in list(_open):
        if failed():
            transport.abort("its program ended with an error, which its own output tells")
        transport.close(drain=False)
