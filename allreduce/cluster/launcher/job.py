"""The ranks of one launch: forward their output and signals, and end them together."""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING

from allreduce import settings
from allreduce.cluster.host import limits
from allreduce.cluster.host.address import LOOPBACK
from allreduce.cluster.host.machine import debugger_of_ended
from allreduce.cluster.launcher.children import (
    FILES,
    NO_LEADER,
    Child,
    Signals,
    StoppedRanks,
    environment,
    spawn,
)
from allreduce.cluster.launcher.output import LogForwarder, Relay, Sink
from allreduce.cluster.store import ranks_text
from allreduce.errors import JoinError
from allreduce.events import logger

if TYPE_CHECKING:
    from allreduce.cluster.leader.service import Leader

_BLAME_SECONDS = 0.1  # after a rank's end, until the leader knows whose connection broke
# After a failure, until ranks that have not noticed get SIGTERM. On two idle cores, ranks that wait
# for a dead one end after 0.8 to 1.1 s.
_NOTICE_SECONDS = 1.5
_PROGRESS_SECONDS = 3.0  # until ranks that are still ending are named
_UNREAD_SECONDS = 1.5  # for the output to be read, after a signal and the last rank's end
_HELD_SECONDS = 0.2  # after SIGKILL, until looking for a debugger that holds a dead rank
_POLL_SECONDS = 1.5  # between looks for stopped ranks; the second one reports them
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # they end the job
_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # passed to the ranks unchanged
_PAUSING = (signal.SIGTSTP, signal.SIGCONT)


class Job:
    """The ranks of one launch.

    Args:
        grace: Seconds for which ranks may go on after a rank has failed, or a signal has come.
    """

    def __init__(self, command: list[str], size: int, grace: float) -> None:
        self._command, self._grace = command, grace
        self._secret = os.environ.get("ALLREDUCE_SECRET") or secrets.token_hex(32)
        self._common = {"SECRET": self._secret, "GRACE": grace}  # settings of all children
        self._size = size
        leading = limits.leader_files(size) if size > 1 else 0
        limits.check_files(size * FILES + Signals.FILES + leading, f"cannot start {size} ranks")
        try:
            self._children = [self._spawn(rank) for rank in range(size)]
        except OSError as error:
            raise JoinError(f"cannot start {size} ranks: {error}; see ulimit -a") from error
        self._out, self._err = Sink(sys.stdout.fileno()), Sink(sys.stderr.fileno())
        self._relays: dict[int, Relay] = {}
        self._plan: list[tuple[float, Callable[[], None]]] = []  # actions and their times, sorted
        self._stop: signal.Signals | None = None
        self._ending = False  # whether ranks will be killed after the grace period
        self._unread = False  # whether all have ended and only output is left
        self._failed: list[Child] = []  # ranks that failed, in order
        self._known = 0.0  # when the leader will know whose connection broke
        self._culprit: Child | None = None  # the rank that was reported
        self._buried = False  # whether other ranks may have written after that report
        self._waited_for = False  # whether ranks have ended, or wait for others
        self._stopped: StoppedRanks | None = None  # from then on
        self._leader: Leader | None = None

    def _spawn(self, rank: int) -> Child:
        """Fork one rank; it starts once it is told where the leader is."""
        own = {"RANK": rank, "SIZE": self._size, "LAUNCHED": os.getpid(), **self._common}
        return spawn(rank, self._command, environment(own))

    def run(self) -> int:
        """Run to the end; returns the exit code."""
        for child in self._children:
            for source, sink in ((child.stdout, self._out), (child.stderr, self._err)):
                self._relays[source] = Relay(source, sink, child)
        self._signals = Signals((*_FORWARDED, *_HANDED_ON, *_PAUSING))
        try:
            word = self._host()
            for child in self._children:
                child.start(word)
            while self._busy():
                self._turn()
        finally:
            self._send(signal.SIGKILL)
            if self._leader is not None:
                self._leader.close()
        return self._code()

    def _host(self) -> bytes:
        """Start the leader; returns its address for the children, or `NO_LEADER`."""
        if self._size == 1:
            return NO_LEADER
        from allreduce.cluster.leader.service import Leader

        timeout = settings.load().timeout
        logger.addHandler(LogForwarder(self._forward_warning))
        logger.propagate = False
        self._leader = Leader(f"{LOOPBACK}:0", self._size, self._secret.encode(), timeout)
        return self._leader.address.encode()

    def _busy(self) -> bool:
        """Return whether a rank runs, or output is left: after a signal, until all are killed."""
        if any(child.code is None for child in self._children):
            return True
        if self._failed and self._culprit is None and self._stop is None:
            return True
        waiting = self._out.waiting or self._err.waiting
        return waiting and (self._stop is None or bool(self._plan))

    def _poll(self) -> list[int]:
        """Wait for an event, or the next planned action; returns the readable descriptors."""
        poll = select.poll()
        poll.register(self._signals.fd, select.POLLIN)
        for sink in (self._out, self._err):
            if sink.waiting:
                poll.register(sink.fd, select.POLLOUT)
        for source, relay in self._relays.items():
            if not relay.sink.full:
                poll.register(source, select.POLLIN)
        wait = max(0.0, self._plan[0][0] - time.monotonic()) * 1000 if self._plan else None
        return [fd for fd, _ in poll.poll(wait)]

    def _turn(self) -> None:
        """Wait for an event and handle it."""
        for fd in self._poll():
            if fd in self._relays:
                self._relays[fd].pump()
                self._forget_ended(fd)
            elif fd == self._signals.fd:
                self._signals.clear()
        for child in self._children:
            if child.reap():
                self._note_end(child)
        self._stop_waiting_for_readers()
        if self._waited_for:
            self._begin_to_look()
        for sink in (self._out, self._err):
            sink.flush()
            if sink.broken and self._stop is None:  # as if it had killed us: no reader is left
                self._forward(signal.SIGPIPE)
        while (number := self._signals.take()) is not None:
            self._act(number)
        if self._plan and time.monotonic() >= self._plan[0][0]:
            self._plan.pop(0)[1]()

    def _note_end(self, child: Child) -> None:
        """Write the rest of its output, and inform the leader and the log of its end."""
        self._finish_output(child)
        if child.code == 0:
            if self._leader is not None:
                self._leader.end(child.rank, child.pid)
            self._waited_for = True
        if child.failed:
            if not self._failed and self._stop is None:
                self._end_after(self._grace)
                self._known = self._after(_BLAME_SECONDS if self._leader else 0.0, self._blame)
            self._failed.append(child)
        self._blame()
        self._repeat_blame()

    def _finish_output(self, child: Child) -> None:
        for source in {child.stdout, child.stderr} & self._relays.keys():
            self._relays[source].drain()
            self._relays[source].ended = True
            self._forget_ended(source)

    def _forward_warning(self, text: str) -> None:
        """Forward the leader's warnings about ranks that have not joined."""
        self._waited_for = True
        self._tell(text)

    def _begin_to_look(self) -> None:
        if self._stopped is None and not self._failed and self._stop is None:
            self._stopped = StoppedRanks(self._children)
            self._after(_POLL_SECONDS, self._look)

    def _look(self) -> None:
        """Report ranks that are stopped while others wait for them, which would go unseen."""
        assert self._stopped is not None, "some wait"
        text = self._stopped.report()
        if text:
            self._tell(text)
        self._after(_POLL_SECONDS, self._look)

    def _forget_ended(self, source: int) -> None:
        if self._relays[source].ended:
            del self._relays[source]
            os.close(source)

    def _act(self, number: signal.Signals) -> None:
        """Forward a signal to the ranks."""
        if number in _HANDED_ON:  # not to their children, which may not expect it
            for child in self._children:
                if child.code is None:
                    os.kill(child.pid, number)
        elif number == signal.SIGTSTP:  # which the kernel ignores for them: no shell is above
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif number == signal.SIGCONT:
            self._send(number)
        else:
            self._forward(number)

    def _forward(self, number: signal.Signals) -> None:
        if self._stop is not None:  # the second time: at once
            self._plan.clear()
            self._kill()
            return
        self._stop = number
        polite = number == signal.SIGINT
        living = [child for child in self._children if child.code is None]
        if number in _FORWARDED:
            reason = "interrupted" if polite else f"got {number.name}"
            self._tell(f"{reason}; ending {self._named(living)}" if living else reason)
        for relay in self._relays.values() if polite else ():
            relay.interrupted = True
        for child in self._children:
            if number in (signal.SIGTERM, signal.SIGPIPE):
                child.end()
            else:
                child.signal(number)
                child.signal(signal.SIGCONT)  # one that is stopped would not act on it
        self._end_after(self._grace)

    def _blame(self, last: bool = False) -> None:
        """Name the rank that failed first, once its end is known, or at `last`.

        A rank that fails because of another one reports that to the leader, which also knows whose
        connection broke first. The first rank to end may have failed because of one that is still
        ending.
        """
        if not self._failed or self._culprit is not None or self._stop is not None:
            return
        if time.monotonic() < self._known and not last:
            return
        victims = self._leader.victims if self._leader is not None else set()
        lost = self._leader.culprit if self._leader is not None else None
        own = [child for child in self._failed if child.rank not in victims]
        child = self._children[lost] if lost is not None else (own or self._failed)[0]
        living = [other for other in self._children if other.code is None]
        if living and not last and (child.code is None or child.rank in victims):
            return
        self._culprit = child
        others = len([other for other in living if other is not child])
        end = f"; ending the other {others}" if others else self._reason(child)
        self._tell(f"{child.name} (process {child.pid}) {child.exit_text}{end}")
        self._buried = bool(others)

    def _repeat_blame(self) -> None:
        """End the output with the rank that failed first and its error, below all tracebacks."""
        child, living = self._culprit, [each for each in self._children if each.code is None]
        if not self._buried or child is None or living or self._stop is not None:
            return
        self._buried = False
        self._tell(f"the job ended because {child.name} {child.exit_text}{self._reason(child)}")

    def _reason(self, child: Child) -> str:
        """Return the end of a line about a rank that has failed: its error, if it is known."""
        reason = self._leader.reason(child.rank) if self._leader is not None else ""
        if child.code == 1:  # an uncaught error; tasks, and ranks that have not joined, report none
            reason = reason or child.error
        return f": {reason}" if reason else ""

    def _tell(self, text: str) -> None:
        """Write a line of our own, from any thread."""
        self._err.write(line(text))
        self._signals.wake()

    def _end_after(self, seconds: float) -> None:
        """Kill the ranks that live after the grace period, which begins once."""
        if self._ending:
            return
        self._ending = True
        self._after(seconds, self._kill)
        self._after(min(_NOTICE_SECONDS, seconds), self._end_unaware)
        if seconds > _PROGRESS_SECONDS:
            self._after(_PROGRESS_SECONDS, self._tell_progress)

    def _end_unaware(self) -> None:
        """Send SIGTERM to the ranks that do not end, and SIGKILL to ranks that a debugger stops.

        Ranks that have left, are ending, or have learnt of a failure and may be saving, have
        reported that to the leader.
        """
        aware = self._aware()
        if self._stop is None:
            lost = self._leader.culprit if self._leader is not None else None
            if lost not in aware:  # otherwise its own end shows how it failed
                self._blame(last=True)
            for child in self._children:
                if child.rank not in aware:
                    child.end()
        held = [child for child in self._children if child.code is None and child.debugged]
        for child in held:
            child.signal(signal.SIGKILL)
        if held:
            self._after(_HELD_SECONDS, self._let_go)

    def _aware(self) -> set[int]:
        """Return the ranks that end by themselves, or may."""
        return self._leader.ending if self._leader is not None else set()

    def _named(self, children: list[Child]) -> str:
        return ranks_text([child.rank for child in children])

    def _tell_progress(self) -> None:
        living = [child for child in self._children if child.code is None]
        if living:
            remaining = self._grace - _PROGRESS_SECONDS
            remedy = "a second signal kills" if self._stop is not None else "Ctrl-C twice kills"
            self._tell(
                f"waiting for {self._named(living)} to end, for up to {remaining:g} s more "
                f"(--grace); {remedy} them"
            )

    def _stop_waiting_for_readers(self) -> None:
        """After a signal, give readers of the output a moment once all ranks have ended."""
        living = any(child.code is None for child in self._children)
        if self._stop is not None and not living and not self._unread:
            self._unread = True
            self._plan.clear()
            self._after(_UNREAD_SECONDS, lambda: None)

    def _after(self, seconds: float, do: Callable[[], None]) -> float:
        """Plan something; returns when it will be."""
        moment = time.monotonic() + seconds
        self._plan = sorted([*self._plan, (moment, do)], key=itemgetter(0))
        return moment

    def _kill(self) -> None:
        self._blame(last=True)
        self._send(signal.SIGKILL)
        self._after(_HELD_SECONDS, self._let_go)

    def _let_go(self) -> None:
        """Stop waiting for dead processes that a debugger holds: they end when it continues."""
        living = [child for child in self._children if child.code is None]
        for child in living:
            debugger = debugger_of_ended(child.pid)
            if debugger:
                child.code = 128 + signal.SIGKILL
                self._tell(
                    f"{child.name} (process {child.pid}) is dead, but process {debugger}, "
                    "which debugs it, has not let it go"
                )
                self._note_end(child)
        self._err.flush()  # there may be no other turn
        if any(child.code is None for child in living):
            self._after(_HELD_SECONDS, self._let_go)

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            child.ending = child.ending or number in (signal.SIGTERM, signal.SIGKILL)
            child.signal(number)

    def _code(self) -> int:
        """Return the exit code: a forwarded signal's, or that of the rank that has failed.

        It is 0 where every rank has ended with 0, also after a signal: they have handled it.
        """
        if self._stop is not None and any(child.code for child in self._children):
            return 128 + self._stop
        failed = [child for child in self._failed if child is self._culprit] or self._failed
        return (failed[0].code or 1) if failed else 0


def line(text: str) -> bytes:
    """Return a line of the launcher's own."""
    return f"[allreduce.run] {text}\n".encode()
