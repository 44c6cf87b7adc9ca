"""Streams and events of devices that run asynchronously to the host.

The host runs CPU instructions itself, in the order of issue, and collectives that the communicator
does not enqueue on devices. It issues the others to their device's stream and continues; it waits
only for values that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from allreduce.comm import Communicator, Work
from allreduce.devices import COLLECTIVE, Device, DeviceName, Event, Stream, owner
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.program_facts import ProgramFacts
from allreduce.graph.schedule.streams import TO_DEVICE, StreamName, stream_of

Step = Callable[[], None]

# Operations on memory that no other step uses: a feed's is new, and a fetch's reserved.
_APART = ("feed", "fetch")

# Besides kernels, operations that read their inputs on a stream only.
_ON_STREAM = ("fetch", "snapshot", "assign", "store_gradient", "store_count", "gradient_norm")


class Queues:
    """The streams of one program, and the events between them.

    A step starts after all earlier work on its devices, except copies from and to the host, which
    have their own memory (outputs.py). Arrays that a step uses stay alive until it ends, even if
    their owners drop them meanwhile.

    Args:
        facts: The program; one thread issues its instructions in order.
        values: The values, by node, of the instructions issued so far.
        arenas: The arenas, which are kept alive too.
        at_once: Whether the host waits for each instruction, for checks of its result.
        communicator: The replica's, which may enqueue collectives on devices.

    Attributes:
        any: Whether there are such devices; False for programs on CPUs.
        loaded: Whether all that was rehearsed is loaded, so that a step loads nothing.
    """

    def __init__(
        self,
        facts: ProgramFacts,
        device: Callable[[DeviceName], Device],
        values: Mapping[int, Any],
        arenas: Mapping[int, Any],
        at_once: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        self._program = program = facts.program
        self._values = values
        self._arenas = arenas
        self._at_once, self._communicator = at_once, communicator
        self.any = facts.beside_host
        self.loaded = True
        self._streams: dict[StreamName, Stream] = {}
        self._events: dict[int, Event] = {}
        self._latest: dict[int, Stream] = {}
        self._kept: list[Any] = []
        self._collectives: dict[StreamName, Stream] = {}
        self._earlier: dict[Stream | None, list[Event]] = {}  # of earlier steps; None: for the host
        self._host_works = False
        if self.any:
            self._open(program, device)

    def _open(self, program: Program, device: Callable[[DeviceName], Device]) -> None:
        names = dict.fromkeys(each.stream for each in program.instructions)
        beside = [each for each in names if not each.device.on_host and each.kind != COLLECTIVE]
        self._streams = {name: device(name.device).own(name.kind) for name in beside}
        if self._communicator is not None:
            others = [each for each in names if not each.device.on_host and each not in beside]
            self._collectives = {
                name: device(name.device).own(name.kind)
                for name in others
                if self._communicator.enqueues_on(device(name.device))
            }
        self._events = {
            index: self._streams[each.stream].device.event()
            for index, each in enumerate(program.instructions)
            if each.signals and each.stream in self._streams
        }
        # The next step starts after these: the last event of each stream that uses a step's memory.
        latest = {
            each.stream: index
            for index, each in enumerate(program.instructions)
            if each.stream in self._streams and each.node.op not in _APART
        }
        self._latest = {index: self._streams[name] for name, index in latest.items()}
        nodes = [each.node for each in program.instructions]
        self._host_works = any(each.device is not None and each.device.on_host for each in nodes)

    def on(
        self, node: Node, work: Callable[..., object], users: bool = False
    ) -> Callable[..., object]:
        """Return `work` so that it runs on a node's stream; on a CPU, `work` itself.

        Args:
            users: Whether a user has written it.
        """
        if not self.any or (name := stream_of(node)) not in self._streams:
            return work
        stream = self._streams[name]
        launch = stream.launch_custom if users else stream.launch
        if not self._at_once:
            return partial(launch, work)

        def done(*arguments: Any) -> None:
            launch(work, *arguments)
            stream.synchronize()

        return done

    def rehearse(self, node: Node, work: Callable[..., object], *arguments: Any) -> None:
        """Prepare a node's stream for `work`: a step takes no memory and loads no kernels."""
        stream = self._streams.get(stream_of(node)) if self.any else None
        if stream is not None:
            self.loaded &= stream.rehearse(work, *arguments)

    def rehearse_custom(self, node: Node, kernel: Callable[..., object], *arguments: Any) -> None:
        """As `rehearse`, of a user's kernel."""
        self.loaded &= self._streams[stream_of(node)].rehearse_custom(kernel, *arguments)

    def behind(self, node: Node, check: Callable[..., object]) -> Callable[..., object]:
        """Return a host function that first waits for a node's stream."""
        stream = self._streams.get(stream_of(node)) if self.any else None
        if stream is None:
            return check

        def wait_and_check(*arguments: Any) -> None:
            stream.hold().synchronize()
            check(*arguments)

        return wait_and_check

    def of(self, node: Node) -> Stream:
        """Return the stream that a copy from or to a device runs on."""
        return self._streams[stream_of(node)]

    def accepts(self, feed: Node, value: Any) -> bool:
        """Return whether `place` would return an argument as it is."""
        return self.of(feed).device.accepts(value)

    def place(self, feed: Node, value: Any) -> Any:
        """Return an argument as the steps' device can use it, or a copy there."""
        stream = self.of(feed)
        device = stream.device
        given_on = None if device.took(value) else owner(value)
        if given_on not in (None, device):  # that device's stream is behind the array's producer
            made = given_on.event()
            given_on.own(TO_DEVICE).record(made)
            stream.wait(made)
        if device.accepts(value):
            return value
        there = device.allocate(value.nbytes, zero=False).array(value.dtype, value.shape)
        device.copy(there, value, stream)
        # The caller may change it after the step has returned.
        stream.hold(there, value).synchronize()
        return there

    def begin(self) -> None:
        """Order this step after earlier ones; release the arrays that they no longer use."""
        self._kept = []
        for stream in self._streams.values():
            stream.let_go()
        devices = dict.fromkeys(stream.device for stream in self._streams.values())
        before = [other for device in devices for other in device.streams()]
        for stream in self._latest.values():
            for other in before:
                if other is not stream and other.passed is not None:
                    stream.wait(other.passed)
        passed = [other.passed for other in before if other.passed is not None]
        self._earlier = {each: list(passed) for each in (None, *self._collectives.values())}

    def keep(self, array: Any) -> None:
        """Keep an array alive until the step ends."""
        if self.any:
            self._kept.append(array)

    def end(self) -> None:
        """End a step: if CPUs take part, wait for the devices' uses of its memory."""
        self._kept = []
        if self._host_works:
            for stream in self._latest.values():
                assert stream.passed is not None, "each instruction was issued"
                stream.passed.synchronize()

    def order_caller(self) -> None:
        """Have the caller's array library write to a step's arguments only after their uses."""
        for stream in self._latest.values():
            assert stream.passed is not None, "each instruction was issued"
            stream.device.order_caller(stream.passed)

    def stop(self) -> None:
        """Wait until all streams are idle."""
        self._kept = []
        for stream in self._streams.values():
            stream.synchronize()
            stream.let_go()

    def ordered(self, index: int, step: Step) -> Step:
        """Return `step` with the waits and signals of its events."""
        instruction = self._program.instructions[index]
        awaited = [self._events[i] for i in instruction.waits if i in self._events]
        stream = self._streams.get(instruction.stream)
        if stream is not None:
            return self._given(stream, awaited, index, step)
        if instruction.stream.kind == COLLECTIVE:
            return self._collective(self._collectives.get(instruction.stream), awaited, step)
        return _after(awaited, step) if awaited else step

    def reader(self, index: int) -> Stream | None:
        """Return the stream that an instruction's inputs are read on; None if the host reads."""
        instruction = self._program.instructions[index]
        node = instruction.node
        reads = node.op in _ON_STREAM or lookup(node.op).kind == "compute"
        if node.op == "update_bucket":
            reads = not node.attrs["bucket"].has_header  # the header is read on the host
        return self._streams.get(instruction.stream) if reads and not self._at_once else None

    def enqueues(self, node: Node) -> bool:
        """Return whether a collective is enqueued on a device, so that the host need not wait."""
        return stream_of(node) in self._collectives and not self._at_once

    def join(self, work: Work) -> None:
        """Order later steps behind a collective that nothing in this one has waited for."""
        for stream in self._latest.values():
            work.synchronize(stream)

    def _collective(self, stream: Stream | None, awaited: Sequence[Event], step: Step) -> Step:
        """Start a collective after its inputs, and when no earlier step reads its memory.

        Without a stream the host waits.
        """

        def run() -> None:
            for each in (*self._earlier[stream], *awaited):
                if stream is None:
                    each.synchronize()
                else:
                    stream.wait(each)
            self._earlier[stream] = []
            step()

        return run

    def _given(self, stream: Stream, awaited: Sequence[Event], index: int, step: Step) -> Step:
        event, is_last = self._events.get(index), index in self._latest

        def run() -> None:
            for each in awaited:
                stream.wait(each)
            step()
            if event is not None:
                stream.record(event)
            if is_last:
                stream.passed = stream.hold(*self._kept, *self._values.values(), self._arenas)

        return run


def _after(awaited: Sequence[Event], step: Step) -> Step:
    def run() -> None:
        for each in awaited:
            each.synchronize()
        step()

    return run
