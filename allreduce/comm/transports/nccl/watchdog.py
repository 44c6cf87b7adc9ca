"""Find failures of calls on GPUs while the host does something else.

NCCL's calls wait on the GPU for as long as a member is missing. A thread looks for dead members,
NCCL's asynchronous errors, calls that do not end in time, and calls that differ between members. It
then aborts the communicator, so that streams and waits end, and the program's next use raises.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allreduce.cluster import LeaderLeftError
from allreduce.cluster.process import exit_hooks
from allreduce.comm.core.transport import Transport
from allreduce.comm.failures.reporter import advice, build_error, dead
from allreduce.comm.transports.native import WARN_SECONDS
from allreduce.comm.transports.nccl.comparison import CallComparison
from allreduce.devices import Event
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    Finding,
    InternalError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    reworded,
)
from allreduce.events import logger

_TICK_SECONDS = 0.02  # between two looks while calls are under way
_IDLE_SECONDS = 0.5
_NEWS_SECONDS = 1.0  # for the store to learn of a death that NCCL has seen
_LIVES_SECONDS = 0.25  # between questions to the store about members that have died
_POLL_SECONDS = 0.0002  # of a thread that waits for a comparison
_COMPARED_SECONDS = 2.0  # for the comparison of the last calls before a member leaves
_END_SECONDS = 5.0

_OTHER_PREFIX = re.compile(r"^\[\w+\] rank \d+: ")  # of errors of the world

_NO_MESSAGE = (
    "the other member has not called, or waits in a message of its own, as when both send first: "
    "let one of them receive first"
)
_FAULTS = {MismatchError: "mismatch", TimeoutError: "timeout", PeerLostError: "lost"}


@dataclass
class Enqueued:
    """A call that was enqueued on a GPU."""

    event: Event
    text: str
    number: int  # of calls that were to be compared up to it
    is_message: bool
    since: float
    ended: bool = False


class Watch:
    """Watches one member's calls.

    Args:
        control: The member of the control plane.
        comparison: Compares calls; None if all members are in this process.
        where: A prefix for messages.
        timeout: Seconds that a call may take.
        lives: Raises if a process has died, or its death becomes known within so many seconds.

    Attributes:
        members: Its members of NCCL's communicators, one for each of its devices.
    """

    def __init__(
        self,
        control: Transport,
        comparison: CallComparison | None,
        where: str,
        timeout: float,
        lives: Callable[[float], None],
    ) -> None:
        self._control, self._comparison = control, comparison
        self._where, self._timeout, self._lives = where, timeout, lives
        self.members: list[Any] = []  # NcclMember, or OneGpuMember
        self._calls = deque[Enqueued]()
        self._ended = 0  # of the calls to compare, those that have ended
        self._failure: AllreduceError | None = None
        self._raised = self._warned = self.closed = False
        self._asked = 0.0  # time of the last question to the store
        self._lock = threading.RLock()

    @property
    def busy(self) -> bool:
        """Whether calls are under way or not compared."""
        comparison = self._comparison
        return bool(self._calls) or (
            comparison is not None and comparison.compared < comparison.made
        )

    @property
    def failed(self) -> bool:
        """Whether a failure has been found."""
        return self._failure is not None

    def add_member(self, member: Any) -> None:
        """Watch the calls of a new member, or abort it if a failure has been found."""
        with self._lock:
            self.members.append(member)
            if self.failed or self.closed or self._control.dead:
                member.abort()
        add(self)

    def begin(self, event: Event, text: str, number: int, is_message: bool) -> Enqueued:
        """Watch a call that was just enqueued."""
        call = Enqueued(event, text, number, is_message, time.monotonic())
        self._calls.append(call)  # without the lock, which a look may hold for milliseconds
        if _idle:
            _new.set()
        return call

    def look(self) -> None:
        """Look for failures; the first one aborts the communicator. Does not block."""
        with self._lock:
            if self._failure is not None or self.closed or not self.members:
                return
            try:
                self._find()
            except AllreduceError as error:
                self._fail(error)
            except Exception as error:
                logger.exception("%s: an unexpected error ends the communicator", self._where)
                self._fail(
                    InternalError(
                        f"{self._where}: watching calls on GPUs failed: {error!r}; please report "
                        "it with the traceback in the log"
                    )
                )

    def check(self) -> None:
        """Raise if the communicator has failed: first the cause, later `ClosedError`."""
        with self._lock:
            failure, raised, self._raised = self._failure, self._raised, True
            if failure is None:
                self._raised = False
                return
        if raised:
            raise dead(self._where, str(failure), failure.finding)
        raise reworded(failure, str(failure))

    def confirm(self, call: Enqueued) -> None:
        """Raise if a call whose event has come was aborted: its result is undefined."""
        # An abort notes the failure before it ends the calls' events.
        if not call.ended and (self._failure is not None or self._control.dead):
            self.look()
            self.check()

    def settle(self) -> None:
        """Wait until the calls that have ended were compared; a value may depend on them.

        Raises:
            AllreduceError: The communicator has failed; or members do not make the calls in time.
        """
        until = time.monotonic() + self._timeout
        needed: int | None = None
        while True:
            for each in _watches():
                each.look()
            self.check()
            needed = self._ended if needed is None else needed
            if self._comparison is None or self._comparison.compared >= needed or self.closed:
                return
            if time.monotonic() > until:
                self.give_up("the comparison of the members' calls", self._timeout)
            time.sleep(_POLL_SECONDS)

    def refuse(self, what: str, error: AllreduceError) -> None:
        """End the communicator on all members, for a call that could not be enqueued on this one.

        Blocks up to a second, for the store to learn of a death that NCCL has seen.

        Args:
            what: The call.
            error: Why.

        Raises:
            AllreduceError: The cause, unless a failure was known before.
        """
        with self._lock:
            if self._failure is None:
                try:
                    self._ask(_NEWS_SECONDS)
                    self._look_at_control()
                except AllreduceError as cause:
                    error = cause
                else:
                    if isinstance(error, TimeoutError):  # of connecting members
                        error = reworded(error, f"{error}; in {what}, {self._missing()}")
                self._fail(error)
            if self._raised:
                return  # `error` says so
        self.check()

    def give_up(self, what: str, waited: float) -> None:
        """End the communicator after a timeout.

        Raises:
            TimeoutError: Always, unless another failure came first.
        """
        with self._lock:
            if self._failure is None:
                self._fail(self._late(what, waited))
        self.check()

    def drain(self) -> None:
        """Wait for the end of the calls under way, and for a while for their comparison.

        A failure, such as a call that does not end in time, ends the wait, too.
        """
        self._asked = math.inf  # the collector, which may run this, may have interrupted a question
        until = time.monotonic() + _COMPARED_SECONDS
        while self.busy and not (self.failed or self.closed):
            if self._calls:
                until = time.monotonic() + _COMPARED_SECONDS
            elif time.monotonic() > until:
                return
            for each in _watches() if _ending else [self]:  # the thread looks no more
                each.look()
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Stop watching."""
        with self._lock:
            self.closed = True
        _watched.pop(id(self), None)
        _new.set()

    def _find(self) -> None:
        self._drop_ended()
        self._compare()
        self._look_at_control()
        found = [each.status() for each in self.members]
        status = next((each for each in found if each not in ("", "InProgress")), "")
        if status:
            self._ask(_NEWS_SECONDS)
            self._look_at_control()
            raise ClosedError(f"{self._where}: NCCL reported {status}; its log says more")
        if not self._calls:
            return
        now = time.monotonic()
        if now - self._asked > _LIVES_SECONDS:
            self._asked = now
            self._ask(0.0)
        oldest = self._calls[0]
        waited = now - oldest.since
        if waited > self._timeout:
            raise self._late(oldest.text, waited)
        if waited > WARN_SECONDS and not self._warned:
            self._warned = True
            missing = self._missing()
            logger.warning(
                "%s has waited %.0f s in %s: %s", self._where, waited, oldest.text, missing
            )

    def _look_at_control(self) -> None:
        """Raise the failure of the control plane, which stays for the thread that waits there."""
        error = self._control.cause()
        if isinstance(error, MismatchError) and self._comparison is not None:
            # Another member has found different calls; this one finds their whole texts.
            until = time.monotonic() + _NEWS_SECONDS
            while self._comparison.differs and time.monotonic() < until:
                self._compare()
                time.sleep(_POLL_SECONDS)
        if error is not None:
            raise error

    def _ask(self, seconds: float) -> None:
        """Ask the store whether a process has died."""
        try:
            self._lives(seconds)
        except (LeaderLeftError, ClosedError):  # no death
            return
        except PeerLostError as error:
            text = _OTHER_PREFIX.sub("", str(error))
            raise build_error(self._where, Finding("lost", text)) from None

    def _drop_ended(self) -> None:
        for call in list(self._calls):
            if not call.event.done():
                return
            if not call.ended:  # the collector may have drained a dropped member meanwhile
                self._calls.popleft()
                call.ended, self._ended, self._warned = True, call.number, False

    def _compare(self) -> None:
        if self._comparison is None:
            return
        try:
            self._comparison.advance()
        except PeerLostError as error:
            left = error.finding is not None and error.finding.fault == "left"
            if not left or self._calls:
                raise
            self._comparison = None  # it needs no more calls, and neither does this member

    def _late(self, what: str, waited: float) -> AllreduceError:
        missing = self._missing()
        text = f"{what} was not complete after {waited:.3g} s: {missing}; {advice(missing)}"
        return build_error(self._where, Finding("timeout", text))

    def _missing(self) -> str:
        """Describe the members that a call waits for, as far as it is known."""
        members = self._control.members
        absent = [] if self._comparison is None else self._comparison.absent()
        others = [each for each in members if each.index != self._control.index]
        found = [members[each] for each in absent] or [each for each in others if each.stopped]
        if not found:
            of_messages = any(each.is_message for each in list(self._calls))
            return _NO_MESSAGE if of_messages else "all members have made it, but it has not ended"
        return "; ".join(f"{each} has not made it ({each.state})" for each in found)

    def _fail(self, error: AllreduceError) -> None:
        """Record a failure, end the communicator on all members, and free the GPU's streams."""
        if error.finding is not None:  # of the control plane, whose calls the program did not make
            finding = error.finding
            if self._calls and finding.call:
                finding = replace(finding, call=self._calls[0].text)
            error = build_error(self._where, finding)
        self._failure = reworded(error, str(error))  # without the traceback
        exit_hooks.note_failure(elsewhere=isinstance(error, PeerLostError))
        try:
            if not self._control.dead:
                faults = (name for kind, name in _FAULTS.items() if isinstance(error, kind))
                text = str(error).removeprefix(f"{self._where}: ")
                self._control.end(error.finding or Finding(next(faults, "aborted"), text))
        finally:
            self.abort_members()

    def abort_members(self) -> None:
        """Free the GPUs' streams, which would wait for ever in calls of a dead communicator."""
        for member in list(self.members):  # another thread may make one
            member.abort()


# By id, for the thread, which runs while there are some.
_watched: dict[int, weakref.ref[Watch]] = {}
_guard = threading.RLock()
_thread: threading.Thread | None = None
_new = threading.Event()  # ends an idle thread's sleep
_idle = False
_ending = False  # whether the interpreter is about to end


def add(watch: Watch) -> None:
    """Have the thread look after a member; starts it for the first one."""
    global _thread
    key = id(watch)
    with _guard:
        _watched[key] = weakref.ref(watch, lambda _: _watched.pop(key, None))
        if _thread is None:
            _thread = threading.Thread(target=_run, name="allreduce-nccl-watchdog", daemon=True)
            _thread.start()


def _watches() -> list[Watch]:
    found = (reference() for reference in list(_watched.values()))
    return [each for each in found if each is not None]


def _look(watches: Sequence[Watch]) -> bool:
    for watch in watches:
        try:
            watch.look()
        except Exception:  # of ending a communicator: the thread watches others, too
            logger.exception("a communicator of GPUs could not be ended")
    return any(watch.busy and not watch.failed for watch in watches)


def _run() -> None:
    global _idle, _thread
    while not _ending:
        busy = _look(_watches())
        if busy:
            time.sleep(_TICK_SECONDS)
            continue
        with _guard:
            if not _watched:
                _thread = None
                return
        _idle = True
        _new.wait(_IDLE_SECONDS)
        _idle = False
        _new.clear()


def _end() -> None:
    """End the thread before the interpreter ends: it may be in native code."""
    global _ending
    thread, _ending = _thread, True
    _new.set()
    if thread is not None:
        thread.join(_END_SECONDS)


def _after_fork() -> None:
    global _guard, _thread, _new, _idle, _ending
    _watched.clear()
    _guard, _thread, _new = threading.RLock(), None, threading.Event()
    _idle = _ending = False


exit_hooks.before_exit(_end)
os.register_at_fork(after_in_child=_after_fork)
