"""Build instructions: one function per operation binds a node to its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce import settings
from allreduce.comm import Communicator, Work
from allreduce.comm.arguments.arrays import dtype_named
from allreduce.comm.arguments.checks import Options
from allreduce.devices import COLLECTIVE, DeviceName, options
from allreduce.devices.registry import runtime
from allreduce.errors import ShapeError, UnsupportedError, UsageError
from allreduce.graph.core.node import Node, blame
from allreduce.graph.core.op_table import located, lookup
from allreduce.graph.execute.frame import Frame, Step
from allreduce.graph.execute.reports import end, watched
from allreduce.graph.execute.sharded_instructions import (
    all_gather_bucket,
    all_reduce_norm,
    gradient_norm,
    reduce_scatter_bucket,
    sum_slices,
    update_own,
    update_slices,
)
from allreduce.graph.ops.collective import neutral_contribution
from allreduce.graph.partition.rendezvous import Key
from allreduce.graph.schedule.streams import COMPUTE, stream_of
from allreduce.graph.trace.printing import say
from allreduce.graph.update.step_checksum import begin_update
from allreduce.graph.update.update import UpdateRule

_CHANGES = ("assign", "update_bucket")  # of variables that other programs use


def build(frame: Frame, node: Node) -> Step:
    """Return the function that runs one of a frame's instructions."""
    kind = lookup(node.op).kind
    usual = _compute if kind == "compute" else _collective
    step = _BUILDERS.get(node.op, usual)(frame, node)
    if frame.syncs:
        step = _synchronized(frame, node, step)
    if frame.replica.guard is not None and node.op in _CHANGES:
        step = _guarded(frame.replica.guard, step)
    return watched(frame, node, step) if options.current().check_numerics else step


def _guarded(guard: threading.Lock, step: Step) -> Step:
    """Return `step` so that it excludes other programs' changes of variables."""

    def run() -> None:
        with guard:
            step()

    return run


def _synchronized(frame: Frame, node: Node, step: Step) -> Step:
    """Return `step` so that it waits for its collective."""

    def run_and_end() -> None:
        step()
        end(frame, node.id)

    return run_and_end


def _compute(frame: Frame, node: Node) -> Step:
    op, values, inputs, attrs = lookup(node.op), frame.values, frame.inputs(node), node.attrs
    assert node.device is not None, node
    view, kernel, target = op.view, op.kernel(node.device.kind), node.id
    on_device = frame.queues.any and not node.device.on_host
    if view is not None:
        if on_device:
            frame.samples[target] = view(frame.sample(node, inputs[0]), attrs)

        def look() -> None:
            values[target] = view(values[inputs[0]], attrs)

        return look
    assert kernel is not None, node
    if target not in frame.outputs.output_nodes:  # these have a new array in each step
        in_place = target in frame.in_place
        values[target] = frame.in_place[target] if in_place else frame.buffer(node)
    if on_device:
        samples = [frame.sample(node, i) for i in inputs]
        rehearse = frame.queues.rehearse_custom if op.users else frame.queues.rehearse
        _rehearse(rehearse, node, kernel, frame.sample(node, target), samples, attrs)
    kernel = frame.queues.on(node, kernel, op.users)

    def run() -> None:
        out, given = values[target], [values[i] for i in inputs]
        try:
            kernel(out, given, attrs)
        except UsageError as error:
            raise located(error, node.op, node.source, node.part) from error.__cause__
        except Exception as error:  # the traceback does not show the user's line
            blame(error, node)
            raise

    return run


def _rehearse(
    rehearse: Callable[..., None], node: Node, work: Callable[..., object], *arguments: Any
) -> None:
    """Call a method of `Queues`; errors name the node's operator and line."""
    try:
        rehearse(node, work, *arguments)
    except UsageError as error:
        raise located(error, node.op, node.source, node.part) from error.__cause__
    except Exception as error:
        blame(error, node)
        raise


def _read(frame: Frame, node: Node) -> Step:
    variable, index = node.attrs["variable"], frame.replica.index
    copy = node.attrs.get("copy", False)
    put, new_array = _putter(frame, node), frame.new_array(node)
    if copy and frame.queues.any:
        frame.samples[node.id] = new_array()  # the first step finds this memory

    def run() -> None:
        value = variable.storage[index]
        if copy:
            put(new := new_array(), value)
            value = new
        frame.values[node.id] = value

    return run


def _assign(frame: Frame, node: Node) -> Step:
    variable, index, (source,) = node.attrs["variable"], frame.replica.index, frame.inputs(node)
    assert node.device is not None, node
    on_host = node.device.on_host
    like = None if on_host else frame.blank(node.device, variable.shape, variable.dtype)
    put = _putter(frame, node, like, source)

    def run() -> None:
        target = variable.storage[index]
        frame.queues.keep(target)
        put(target, frame.values[source])

    return run


def _print(frame: Frame, node: Node) -> Step:
    who = f"replica {frame.replica.id}: " if frame.replica.communicator is not None else ""
    parts, sep = node.attrs["parts"], node.attrs["sep"]

    def run() -> None:
        say([frame.values[i] for i in node.inputs], parts, sep, who)

    return run


def _store(frame: Frame, node: Node) -> Step:
    """Store a gradient, or the count of samples, in the arena."""
    is_count, (source,) = node.op == "store_count", frame.inputs(node)
    place = frame.arena(node).count if is_count else frame.gradient(node)
    put = _putter(frame, node, place, source, adds="adds" in node.attrs)

    def run() -> None:
        put(place, frame.values[source])

    return run


def _clear_gradients(frame: Frame, node: Node) -> Step:
    arena, put = frame.arena(node), _putter(frame, node)
    always = "adds" not in node.attrs

    def run() -> None:
        if always or arena.begins:
            put(arena.gradients, 0)

    return run


def _all_reduce_bucket(frame: Frame, node: Node) -> Step:
    bucket, communicator = node.attrs["bucket"], frame.communicator
    arena, checksum = frame.arena(node), frame.checksum(node)
    part = arena.gradients[bucket.start : bucket.stop]
    if "wire" in node.attrs:
        return _short_all_reduce(frame, node, part)
    start = _sum_init(communicator, part)

    def run() -> None:
        if bucket.has_header:  # another bucket's may start after the header's update has counted
            arena.number = arena.iterations + 1
        if checksum is not None:
            checksum.put(arena)
        frame.works[node.id] = start()

    return run


def _sum_init(communicator: Communicator, array: Any) -> Callable[[], Work]:
    """Prepare the sum of an array in place, on a device behind what its stream waits for."""
    return communicator._dispatch.bind("all_reduce", array, Options("sum"), array, ordered=True)


def _short_all_reduce(frame: Frame, node: Node, part: np.ndarray) -> Step:
    """Reduce gradients in a shorter dtype; what waits for it has them in their own."""
    assert node.device is not None, node
    device = frame.device(node.device)
    dtype = dtype_named(node.attrs["wire"])
    wire = device.allocate(part.size * dtype.itemsize).array(dtype, part.shape)
    start = _sum_init(frame.communicator, wire)
    before, after = device.own(COLLECTIVE), device.own(COMPUTE)
    before.rehearse(device.assign, wire, part)
    after.rehearse(device.assign, part, wire)
    frame.received[node.id] = partial(after.launch, device.assign, part, wire)

    def run() -> None:
        before.launch(device.assign, wire, part)
        frame.works[node.id] = start()

    return run


def _collective(frame: Frame, node: Node) -> Step:
    """Exchange values among the replicas in the middle of a step."""
    communicator, out = frame.communicator, frame.buffer(node)
    frame.values[node.id] = out
    call = getattr(communicator, node.op)
    named = _named(frame, node)
    on_stream = frame.queues.enqueues(node)  # behind earlier collectives
    absent = node.attrs.get("absent")
    nothing = frame.constant(node, neutral_contribution(node, out.shape)) if absent else None

    def run() -> None:
        if not on_stream:
            for i in node.inputs:  # an input may be a collective's result
                end(frame, i)
        x = frame.values[node.inputs[0]] if nothing is None else nothing
        if on_stream:
            frame.works[node.id] = communicator.enqueue(node.op, x, out=out, **named)
        else:
            frame.works[node.id] = call(x, out=out, async_op=True, **named)

    return run


def _named(frame: Frame, node: Node) -> dict[str, Any]:
    """Return the keywords of a collective's call."""
    if node.op == "all_reduce":
        return {"op": node.attrs["op"]}
    factor = node.attrs["rows_per_sample"]
    if factor is None:
        return {}
    return {"counts": [factor * rows for rows in frame.info.rows_per_replica or ()]}


def _update_bucket(frame: Frame, node: Node) -> Step:
    arena, bucket, rule = frame.arena(node), node.attrs["bucket"], node.attrs["rule"]
    plan = node.attrs["plan"]
    assert node.device is not None, node
    part = slice(bucket.parameters_start, bucket.stop)
    parameters, gradients = arena.parameters[part], arena.gradients[part]
    slots = {name: array[part] for name, array in arena.slots.items()}
    is_first, checksum = bucket.has_header, frame.checksum(node)
    count = arena.count if rule.clip_norm is None else arena.divisor
    change = _update_of(node, bucket.paths(arena.layout))
    if not node.device.on_host:
        arguments = (parameters, gradients, slots, count, arena.iterations + 1)
        _rehearse(frame.queues.rehearse, node, change, *arguments)
    update = frame.queues.on(node, change)
    begin = frame.queues.behind(node, begin_update) if is_first else begin_update
    is_shared = frame.replica.guard is not None  # another program's optimizer may hold the values
    is_remote = frame.replica.updates_remotely

    def run() -> None:
        if is_remote:
            begin(arena, checksum, is_first)
            return
        if is_shared:
            plan.take_over()
        if arena.loaded:  # others have read the old slots, as they have begun this step
            plan.settle(arena)
        begin(arena, checksum, is_first)
        update(parameters, gradients, slots, count, arena.iterations)

    return run


def _update_of(node: Node, spans: Sequence[tuple[str, slice]]) -> Callable[..., None]:
    """Return the function that updates a bucket on a node's device."""
    rule: UpdateRule = node.attrs["rule"]
    assert node.device is not None, node
    if node.device.on_host:
        return rule.bucket_update(spans)
    return rule.bucket_update(spans, partial(_device_update, node))


def _device_update(node: Node, rule: Any, kind: type) -> Callable[..., None]:
    """Find the update that a node's kind of device has for an optimizer."""
    assert node.device is not None, node
    found = runtime(str(node.device.kind)).update(rule, kind)
    if found is None:
        raise UnsupportedError(
            f"{node.source}: {kind.__name__} has no kernel for {node.device.kind}; place the "
            'variables on ar.device("CPU:0"), or use another optimizer'
        )
    return found


def _send(frame: Frame, node: Node) -> Step:
    if not node.inputs:  # a control transfer without a value
        return lambda: frame.rendezvous.send(_key(frame, node), np.zeros((), np.int64))
    source, across = node.inputs[0], node.attrs["across"]

    def run() -> None:
        value = frame.values[source]
        if across and not frame.rendezvous.copies:
            value = value.copy()  # another task may receive it only after it has changed
        frame.rendezvous.send(_key(frame, node), value)

    return run


def _receive(frame: Frame, node: Node) -> Step:
    # Inside a task sends come first in issue order, so the value is there.
    timeout = settings.load().timeout if node.attrs["across"] else 1.0

    if node.id in frame.outputs.arriving:
        shape, dtype = frame.shape(node), node.spec.dtype

        def take() -> None:
            value = frame.rendezvous.receive(_key(frame, node), timeout)
            if value.shape != shape or value.dtype != dtype:
                raise ShapeError(
                    f"{node.attrs['source']} has sent {value.dtype} {value.shape}, not {node.spec}"
                )
            frame.values[node.id] = value

        return take
    out, name = frame.buffer(node), stream_of(node)
    device = frame.device(name.device)  # the device that copies
    stream = device.own(name.kind)
    source = DeviceName.parse(node.attrs["source"])
    assert node.device is not None, node
    if not (node.attrs["across"] or source.on_host or node.device.on_host):
        # Between GPUs a kernel may copy; from and to the host the driver does.
        stream.rehearse(device.assign, out, frame.blank(source, node.spec.shape, node.spec.dtype))

    def copy() -> None:
        device.copy(out, frame.rendezvous.receive(_key(frame, node), timeout), stream)
        frame.values[node.id] = out

    return copy


def _feed(frame: Frame, node: Node) -> Step:
    source = node.inputs[0]

    def run() -> None:
        frame.values[node.id] = frame.values[source]  # `BoundProgram.place` has copied it

    return run


def _snapshot(frame: Frame, node: Node) -> Step:
    (source,) = frame.inputs(node)
    put = _putter(frame, node, frame.sample(node, node.id), source)

    def run() -> None:
        put(frame.values[node.id], frame.values[source])

    return run


def _fetch(frame: Frame, node: Node) -> Step:
    stream, source = frame.queues.of(node), node.inputs[0]
    # The first step finds this memory.
    frame.samples[node.id] = stream.device.host_empty(frame.shape(node), node.spec.dtype)

    def run() -> None:
        value = frame.values[source]
        there = stream.device.host_empty(value.shape, value.dtype)
        stream.device.copy(there, value, stream)
        frame.outputs.fetch(node, there, stream.hold(there, value))

    return run


def _scan(frame: Frame, node: Node) -> Step:
    return frame.loops[node.id].run


def _scan_result(frame: Frame, node: Node) -> Step:
    # It lies in the loop's memory.
    frame.values[node.id] = frame.loops[node.inputs[0]].result(node.attrs["index"])
    return _nothing


def _putter(
    frame: Frame, node: Node, place: Any = None, source: int | None = None, adds: bool = False
) -> Callable[..., object]:
    """Return what sets an array of a node's device, or adds to it, on the device's stream.

    Args:
        place: The array, or one like it for `Stream.rehearse`.
        source: The value that it is set to, if that is one of the program.
    """
    assert node.device is not None, node
    device = frame.device(node.device)
    change = device.accumulate if adds else device.assign
    if place is not None and source is not None and not node.device.on_host:
        _rehearse(frame.queues.rehearse, node, change, place, frame.sample(node, source))
    return frame.queues.on(node, change)


def _nothing() -> None:
    pass


def _key(frame: Frame, node: Node) -> Key:
    generation, step = frame.replica.generation, frame.info.step
    edge, source = node.attrs["edge"], node.attrs["source"]
    return Key(generation, step, edge, source, node.attrs["destination"])


_BUILDERS: dict[str, Callable[[Frame, Node], Step]] = {
    "read": _read,
    "assign": _assign,
    "print": _print,
    "store_gradient": _store,
    "store_count": _store,
    "clear_gradients": _clear_gradients,
    "all_reduce_bucket": _all_reduce_bucket,
    "gradient_norm": gradient_norm,
    "all_reduce_norm": all_reduce_norm,
    "update_bucket": _update_bucket,
    "sum_slices": sum_slices,
    "update_slices": update_slices,
    "reduce_scatter_bucket": reduce_scatter_bucket,
    "update_own": update_own,
    "all_gather_bucket": all_gather_bucket,
    "send": _send,
    "receive": _receive,
    "feed": _feed,
    "snapshot": _snapshot,
    "fetch": _fetch,
    "scan": _scan,
    "scan_result": _scan_result,
}
