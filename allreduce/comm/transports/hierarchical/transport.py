"""The transport of two levels: shared memory within hosts, tcp or mpi between them.

A call becomes chains of steps (chains.py). Each step is a call of a smaller communicator, a level:
the host's members before and after the exchange ("in" and "out", two communicators so that their
orders of calls are independent), and the member's lane in between ("across"). A member starts the
steps of a level in the order of calls, which is the same on all members, so there is no deadlock.
Chains progress only while a thread waits; a wait for any call drives all calls of the process.

Results are bitwise equal on all members: each element is reduced once, in one lane, and then
distributed. They may differ from those of `shared`, which adds in another order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allreduce.comm.calls.call import Array, Call
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core import progress
from allreduce.comm.core.locks import run_locked
from allreduce.comm.core.transport import Transport
from allreduce.comm.core.work import Work
from allreduce.comm.transports.hierarchical.chains import make_chains
from allreduce.comm.transports.hierarchical.control_channel import ControlChannel
from allreduce.comm.transports.hierarchical.layout import Layout
from allreduce.comm.transports.hierarchical.levels import (
    ChainQueue,
    ChainRun,
    Level,
    LevelError,
    guarded,
    register,
)
from allreduce.comm.transports.hierarchical.plan import plan_hierarchical
from allreduce.comm.transports.hierarchical.wait_monitor import WaitMonitor
from allreduce.comm.transports.tcp.transport import TcpWork
from allreduce.errors import AllreduceError, ClosedError, Finding, UsageError

_POLL_SECONDS = 0.005  # between checks for failures
_YIELD_SECONDS = 2.0  # for another member, which knows more, to give up first
_END = "the hierarchical communicator that this belongs to has ended"
_LATER = ("mismatch", "left")  # faults that do not end calls that all members have posted


class HierarchicalTransport(Transport):
    """One member."""

    name = "hierarchical"

    def __init__(
        self,
        control: ControlChannel,
        levels: dict[str, Level],
        layout: Layout,
        timeout: float,
    ) -> None:
        self.index = control.index
        self.layout, self._control = layout, control
        self._levels, self._runs = levels, ChainQueue(levels)
        self.any_thread = all(level.transport.any_thread for level in levels.values())
        self._works: set[HierarchicalWork] = set()
        self._timeout = timeout
        self._dead = self._closed = False
        self._looked = 0.0  # time of the last check for failures
        self._lock = threading.RLock()
        register(self)

    def __del__(self) -> None:
        """Close if not closed yet."""
        self.close(drain=False)

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        return self._control.members

    def admit(self) -> None:
        self._control.admit()
        for level in self._levels.values():
            level.transport.admit()

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> Work:
        self.admit()
        if x is not None:  # NumPy scalars have no buffer
            x = np.asarray(x)
        if call.collective in ("send", "recv"):
            return self._control.start(call, x, out, result)
        chains = make_chains(call, self.layout, self.index)
        if "every" not in self._levels and any("every" in chain.levels for chain in chains):
            return self._control.start(call, x, out, result)
        with self.uninterrupted("a start"):
            with self._lock:  # order the calls of several threads
                agreed = self._control.agree(call, x, out)
                work = HierarchicalWork(self, agreed, result)
                if call.collective == "barrier":  # it completes after all calls before it
                    work.runs = self._runs.unfinished
                for chain in chains:
                    run = ChainRun(chain, agreed, x, out)
                    work.runs.append(run)
                    self._runs.add(run)
                self._works.add(work)
            progress.make_progress()
        return work

    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:  # noqa: ARG002
        return plan_hierarchical(call, self.layout, self.index, self._plan_part)

    def _plan_part(self, level: str, call: Call) -> Plan:
        carrier = self._levels[level].transport if level in self._levels else self._control
        return carrier.plan(call, None, None)

    def forget(self, work: HierarchicalWork) -> None:
        """Release a completed work."""
        with self._lock:
            self._works.discard(work)

    def poll(self, work: HierarchicalWork) -> None:
        """Make progress without blocking; raise if the communicator has failed."""
        self.admit()
        progress.make_progress()
        self._check(work)

    @property
    def dead(self) -> bool:
        return self._dead or self._control.dead

    def check_alive(self) -> None:
        if self.dead:
            self._end()
            self._control.check_alive()

    def cause(self) -> AllreduceError | None:
        if self.dead:
            self._end()
        return self._control.cause()

    @property
    def ended(self) -> bool:
        """Whether the transport has noticed its end; arrays are not touched any more."""
        return self._dead

    def drive(self) -> bool:
        """Make progress on this member's calls; return whether some are in flight."""
        if not self._admits():  # a thread that must not call a level must not make it fail
            return bool(self._runs.active)
        found: list[bool] = []  # stays empty if another thread holds the lock
        run_locked(self._lock, 0.0, lambda: found.append(self._advance()))
        return found != [False]

    def _advance(self) -> bool:
        if self._dead or self._closed:
            return False
        with self.uninterrupted("a call"):  # an interrupt would leave it half done
            try:
                return self._runs.advance()
            except LevelError as failure:
                self._fail(failure)
            except MemoryError as shortage:
                self.abort(f"it has too little working memory: {shortage}")
        return False

    def _admits(self) -> bool:
        try:
            self.admit()
        except UsageError:
            return False
        return True

    def complete(self, work: HierarchicalWork, timeout: float | None) -> None:
        """Wait for a work.

        Args:
            timeout: Seconds from now, or None for the transport's timeout.
        """
        total = self._timeout if timeout is None else timeout
        with self.uninterrupted():  # an interrupted call would touch its arrays later
            self.admit()
            monitor = WaitMonitor(self._control, work.agreed, partial(self._absent, work), total)
            try:
                self._drive_until_complete(work, monitor)
            finally:
                monitor.end()

    def _drive_until_complete(self, work: HierarchicalWork, monitor: WaitMonitor) -> None:
        """Drive all calls of this process until a work is complete."""
        while True:
            seconds = progress.make_progress()
            if work.complete:
                return
            self._check(work)
            monitor.check()
            if monitor.left <= 0:
                self._give_up(work, monitor)
            self._pause(work, min(seconds, monitor.left))

    def _pause(self, work: HierarchicalWork, seconds: float) -> None:
        """Wait for at most `seconds` for an event that allows progress."""
        with self._lock:
            running_works = self._runs.running_works()
        try:
            if running_works:
                urgent = max(running_works, key=lambda one: one[1].transport.wait_priority)
                held, _, agreed = urgent
                guarded(partial(held.pause, seconds), agreed)
            elif not work.agreed.native.done:
                self._control.wait_for(work.agreed.native, seconds)
            else:  # another thread drives it
                time.sleep(min(seconds, progress.SLICE_SECONDS))
        except LevelError as failure:
            with self._lock:
                self._fail(failure)

    def _check(self, work: HierarchicalWork) -> None:
        """Raise if a work cannot complete any more."""
        if self._closed:
            raise ClosedError(f"{self._control.where}: the communicator is closed")
        if not self._dead:
            now = time.monotonic()
            if now - self._looked < _POLL_SECONDS:
                return
            self._looked = now
            verdict = self._control.verdict()
            if verdict is None:
                return
            leaves = verdict[0] in _LATER
            if leaves and self._can_complete():
                return
            self._end(leaves=leaves)
        if not work.complete:  # another thread may just have completed it
            raise self._control.failure(work.agreed)

    def _can_complete(self) -> bool:
        """Return whether calls that all members have posted are still in flight."""
        with self._lock:
            return any(one.agreed.native.done and not one.complete for one in self._works)

    def _fail(self, failure: LevelError) -> None:
        """End the communicator on all members after a level failed, unless it is closed."""
        if not self._dead and not self._closed:
            self._control.propagate_failure(failure.error, failure.agreed)
            self._end()

    def _end(self, *, leaves: bool = False) -> None:
        """Stop touching arrays, and end waits in the levels.

        Args:
            leaves: Whether to let the others complete calls that are complete here.
        """
        with self._lock:
            if self._dead:
                return
            self._dead = True
            for level in self._levels.values():
                if leaves and not level.transport.closes_together:
                    level.transport.close(drain=False)
                else:
                    level.transport.abort(_END)
            self._runs.clear()

    def _absent(self, work: HierarchicalWork) -> list[int]:
        """Return the members that a work may wait for."""
        if not work.agreed.native.done:
            absent = work.agreed.absent()
        else:
            with self._lock:
                first = self._runs.running_works()[:1]
            absent = [level.numbers[member] for held, level, _ in first for member in held.absent()]
        return [member for member in absent if member != self.index]

    def _give_up(self, work: HierarchicalWork, monitor: WaitMonitor) -> None:
        blamed, reason = monitor.blamed(), monitor.reason()
        mates = self.layout.hosts[self.layout.places[blamed][0]]
        if len(mates) > 1 and self.index not in mates:
            self._control.await_verdict(_YIELD_SECONDS)  # members on its host know its state
        self._control.give_up(work.agreed, blamed, reason)
        self._end()
        raise self._control.failure(work.agreed)

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate ordinary memory; all members ask for the same size."""
        return self._control.empty(nbytes)

    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        self._control.abort(reason, interrupted=interrupted)
        self._end()

    def end(self, finding: Finding) -> None:
        self._control.end(finding)
        self._end()

    def close(self, drain: bool) -> None:
        if self._control.inherited:
            return
        with self._lock:
            if self._closed:
                return
            pending = [work for work in self._works if not work.complete]
        try:
            if drain and not self._dead:
                for work in pending:
                    work.wait()
        finally:
            with self._lock:
                self._closed = True
                self._runs.clear()
                self._works.clear()
            for level in self._levels.values():
                level.transport.close(drain=False)
            self._control.close(drain and not self._dead)

    def close_inherited(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may hold it
        for level in self._levels.values():
            level.transport.close_inherited()
        self._control.close_inherited()


class HierarchicalWork(Work):
    """A started call; its chains keep its arrays alive."""

    def __init__(
        self, transport: HierarchicalTransport, agreed: TcpWork, result: Callable[[], Any]
    ) -> None:
        self._transport, self.agreed, self._result = transport, agreed, result
        self.runs: list[ChainRun] = []

    @property
    def complete(self) -> bool:
        """Whether all its chains are finished."""
        return self.agreed.native.done and all(run.finished for run in self.runs)

    @property
    def settled(self) -> bool:
        return self.complete or self._transport.ended

    def absent(self) -> list[int]:
        """Return the members that it may wait for."""
        return self._transport._absent(self)

    def done(self) -> bool:
        if not self.complete:
            self._transport.poll(self)
        return self.complete

    def finish(self, timeout: float | None) -> Any:
        if not self.complete:
            self._transport.complete(self, timeout)
        self._transport.forget(self)
        return self._result()
