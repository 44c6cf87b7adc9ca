"""NCCL for arrays on GPUs, beside a CPU transport that carries everything else.

The CPU transport is the control plane: objects, counts and host arrays go over it, and it knows
which member has died. NCCL's communicator is made at the first call of arrays on a GPU, which is
the same call on all members.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allreduce.comm.calls.call import MESSAGES, Array, Call
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core import progress
from allreduce.comm.core.transport import PreparedOnDevice, Transport
from allreduce.comm.core.work import Work
from allreduce.comm.failures.reporter import group_text
from allreduce.comm.transports.nccl import agreement, carries, watchdog
from allreduce.comm.transports.nccl.comparison import CallComparison, calls_text
from allreduce.devices import Device, Event, Stream, options
from allreduce.errors import AllreduceError, Finding, UsageError

_SPIN_SECONDS = 0.0005  # of a wait, without sleeping
_SLEEP_SECONDS = 0.0002
_CHECK_SECONDS = 0.05  # between a wait's looks for failures


class NcclTransport(Transport):
    """One member.

    Args:
        control: Its member of the control plane.
        plane: Its member of the communicator that compares calls; None if all members are in this
            process.
        group: The communicator's name.
        timeout: Limit for any wait, in seconds.
        lives: Raises if a process has died, or its death becomes known within so many seconds.
    """

    name = "nccl"

    def __init__(
        self,
        control: Transport,
        plane: Transport | None,
        group: str,
        timeout: float,
        lives: Callable[[float], None],
    ) -> None:
        self.control, self._plane = control, plane
        self.index = control.index
        self.any_thread = control.any_thread
        self._group, self._timeout = group, timeout
        self._where = f"[nccl] {group_text(group)}{self.called(self.index)}"
        self._comparison = None if plane is None else CallComparison(plane, group, self._where)
        self.watch = watchdog.Watch(control, self._comparison, self._where, timeout, lives)
        self._members: dict[Device, Any] = {}  # NcclMember, or OneGpuMember
        self._numbers: dict[Device, int] = {}  # of NCCL's communicators, the same on all members
        self._making = threading.Lock()

    @property
    def on_host(self) -> Transport:
        return self.control.on_host

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        return self.control.members

    def admit(self) -> None:
        self.control.admit()

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> Work:
        return self.control.start(call, x, out, result)

    def bind(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> Callable[[], Work]:
        return self.control.bind(call, x, out, result)

    def enqueues_on(self, device: Device) -> bool:
        return bool(device.identity)

    def start_on_device(self, ready: PreparedOnDevice, *, ordered: bool = False) -> NcclWork:
        return self._enqueue([ready], ready.result, ordered)

    def start_list_on_device(
        self, calls: Sequence[PreparedOnDevice], result: Callable[[], Any]
    ) -> NcclWork:
        return self._enqueue(calls, result, False)

    def _enqueue(
        self, calls: Sequence[PreparedOnDevice], result: Callable[[], Any], ordered: bool
    ) -> NcclWork:
        self.admit()
        self.check_alive()
        device = calls[0].device
        communicator = self._numbers.setdefault(device, len(self._numbers))
        factors = tuple(each.factor for each in calls)
        text = calls_text(tuple(each.call for each in calls), factors, communicator)
        if options.current().strict_collectives:
            self._compare(text)
        # Before the member is made: other members may not make it, but call with another GPU.
        number = 0 if self._comparison is None else self._comparison.add(calls, communicator)
        member = self.member(device)
        try:
            event = member.enqueue(calls, ordered=ordered)
        except AllreduceError as error:
            if not error.everywhere:  # the others have enqueued it, and wait
                self.watch.refuse(text, error)
            raise
        is_message = calls[0].call.collective in MESSAGES
        return NcclWork(self, self.watch.begin(event, text, number, is_message), result)

    def check_carries(self, where: str, call: Call) -> None:
        carries.check_carries(where, call.collective, call.op, call.dtype)

    def member(self, device: Device) -> Any:
        """Return the NCCL communicator of a device's arrays.

        All members make it together, at the first call of arrays on that device.
        """
        with self._making:
            if device not in self._members:
                try:
                    self._members[device] = self._make(device)
                except AllreduceError:
                    self.watch.look()  # which may find more than the control plane has said
                    self.watch.check()
                    raise
            return self._members[device]

    def _make(self, device: Device) -> Any:
        found = self._agree(device)
        one_process = all(each.pid == os.getpid() for each in self.members)
        if one_process and len(found) > 1 and len({each.gpu for each in found}) == 1:
            made = self._on_one_gpu(device)
        else:
            agreement.check(self._where, found, self.called, one_process=one_process)
            made = self._with_nccl(device)
        self.watch.add_member(made)
        self._meet("barrier", None, "finish it")
        device.guards.append(self.watch.settle)
        return made

    def _on_one_gpu(self, device: Device) -> Any:
        from allreduce.comm.transports.nccl import one_gpu

        number = np.zeros(1, np.int64)
        if self.index == 0:
            place = one_gpu.Meeting(len(self.members), self.called)
            number[0] = place.number
        self._meet("broadcast", number, "meet on one GPU")
        place = place if self.index == 0 else one_gpu.meeting(int(number[0]))

        def look(waited: float) -> None:
            if waited > self._timeout:
                self.watch.give_up("a call of replicas on one GPU", waited)
            self.check_alive()

        return one_gpu.OneGpuMember(device, self.index, place, self._where, look)

    def _with_nccl(self, device: Device) -> Any:
        from allreduce.comm.transports.nccl import library
        from allreduce.comm.transports.nccl.member import NcclMember

        identifier = np.zeros(128, np.uint8)
        text = f"make an NCCL communicator of {len(self.members)} members"
        try:
            if self.index == 0:
                identifier[:] = library.unique_id(self._where)
            self._meet("broadcast", identifier, text)
            return NcclMember(
                *(device, len(self.members), self.index, identifier),
                *(self._where, self._timeout, self.check_alive),
            )
        except AllreduceError as error:
            if not self.dead:  # the others would wait for this member
                self.control.end(Finding("aborted", str(error).removeprefix(f"{self._where}: ")))
            raise

    def _agree(self, device: Device) -> list[agreement.Facts]:
        """Exchange facts about the members' GPUs and NCCLs."""
        mine = agreement.facts_of(device).pack()
        everyones = np.zeros((len(self.members), mine.size), np.uint8)
        text = "nccl(first call of arrays on GPUs)"  # in errors, if others make another call
        call = Call("all_gather", None, "uint8", mine.size, None, self._group, call_text=text)
        self.control.start(call, mine, everyones, lambda: None).wait()
        return [agreement.Facts.unpack(each) for each in everyones]

    def _compare(self, text: str) -> None:
        """Compare a call's text with the other members' before it is enqueued."""
        same = Call("barrier", None, "none", 0, None, self._group, call_text=text)
        self.control.start(same, None, None, lambda: None).wait()

    def _meet(self, collective: str, array: NDArray[Any] | None, text: str) -> None:
        count, dtype = (0, "none") if array is None else (array.size, str(array.dtype))
        root = None if array is None else 0
        call = Call(collective, None, dtype, count, root, self._group, call_text=f"nccl({text})")
        self.control.start(call, array, array, lambda: None).wait()

    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:
        return self.control.plan(call, x, out)

    @property
    def dead(self) -> bool:
        return self.watch.failed or self.control.dead

    def check_alive(self) -> None:
        if self.dead:
            self.watch.look()
            self.watch.check()
            self.control.check_alive()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        return self.control.empty(nbytes)

    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        self.control.abort(reason, interrupted=interrupted)
        self.watch.abort_members()

    def end(self, finding: Finding) -> None:
        self.control.end(finding)
        self.watch.abort_members()

    def drain(self) -> None:
        if not self.dead:
            self.watch.drain()
        if not self.dead:
            for member in list(self._members.values()):
                member.finalize()

    def close(self, drain: bool) -> None:
        if drain:
            self.drain()
        members = self._members.values()
        self.watch.leave()
        for member in members:
            if self.watch.settle in member.device.guards:
                member.device.guards.remove(self.watch.settle)
        if self.dead:
            self.watch.abort_members()
        for member in members:
            member.close()
        if self._plane is not None:
            self._plane.close(drain=False)
        self.control.close(drain)

    def close_inherited(self) -> None:
        self._members = {}  # CUDA does not work in a child made by fork
        self.watch.closed = True
        if self._plane is not None:
            self._plane.close_inherited()
        self.control.close_inherited()


class NcclWork(Work):
    """A call that was enqueued on a device."""

    def __init__(
        self, transport: NcclTransport, call: watchdog.Enqueued, result: Callable[[], Any]
    ) -> None:
        self._transport, self._call, self._result = transport, call, result

    def event(self) -> Event:
        """Return the event of the call's end, for streams to wait for."""
        return self._call.event

    def synchronize(self, stream: Any) -> Any:
        """Have a stream wait for the call; the host does not. Returns the result.

        Args:
            stream: A stream of a GPU, or one of a library that has CUDA's stream protocol, such as
                CuPy's current one.
        """
        event: Any = self._call.event  # CUDA's
        if isinstance(stream, Stream) and stream.device.identity:
            stream.wait(event)
        elif hasattr(stream, "__cuda_stream__"):
            _, address = stream.__cuda_stream__()
            event.block(int(address))
        else:
            raise UsageError(
                f"{self.where}: synchronize takes a stream of a GPU, but got "
                f"{type(stream).__name__}; pass cupy.cuda.get_current_stream(), or call wait()"
            )
        return self._result()

    def done(self) -> bool:
        if not self._call.event.done():
            self._transport.check_alive()
            return False
        self._transport.watch.confirm(self._call)
        return True

    @property
    def settled(self) -> bool:
        return self._transport.dead or self._call.event.done()

    def finish(self, timeout: float | None) -> Any:
        limit = self._transport._timeout if timeout is None else timeout
        watch, event = self._transport.watch, self._call.event
        began = checked = time.monotonic()
        while not event.done():
            now = time.monotonic()
            if now - began > limit:
                watch.give_up(self._call.text, now - began)
            if now - checked > _CHECK_SECONDS:
                checked = now
                progress.make_progress()
                self._transport.check_alive()
            time.sleep(0.0 if now - began < _SPIN_SECONDS else _SLEEP_SECONDS)
        watch.confirm(self._call)
        return self._result()
