"""Instructions of sharded updates: each member updates its slice of a bucket.

In memory that all members map, one instruction sums a slice, updates it and stores it for all
members; or two, with the norm between them. Over other transports there are three: reduce_scatter,
update and all_gather.

To clip by the norm of all gradients, updates divide by more than the count; they divide by it
anyway, so clipping only reads the gradients. With sharded updates each member adds up its own
slices, and one all-reduce of a single number joins them.
"""

from __future__ import annotations

import numpy as np

from allreduce.comm.fused_update import sum_init, update_init
from allreduce.devices import options
from allreduce.devices.clipping import set_divisor, sum_of_squares
from allreduce.graph.core.node import Node
from allreduce.graph.execute.frame import Frame, Step
from allreduce.graph.execute.reports import end
from allreduce.graph.update.sharded_update import Slices
from allreduce.graph.update.step_checksum import begin_update
from allreduce.reduction import Bucket, Layout, ShardMode


def sum_slices(frame: Frame, node: Node) -> Step:
    """Return the function that starts a bucket's sums, in which each member has a slice."""
    bucket = node.attrs["bucket"]
    start = sum_init(frame.communicator, frame.arena(node).gradients[bucket.start : bucket.stop])

    def run() -> None:
        frame.works[node.id] = start()

    return run


def update_slices(frame: Frame, node: Node) -> Step:
    """Return the function that starts a bucket's update, in which each member has a slice."""
    plan, bucket, rule = (node.attrs[name] for name in ("plan", "bucket", "rule"))
    arena, communicator = frame.arena(node), frame.communicator
    part, header = slice(bucket.start, bucket.stop), arena.gradients[: arena.layout.header]
    slots = {name: array[part] for name, array in arena.slots.items()}
    native = rule.native(header, slots)
    gradients, parameters = arena.gradients[part], arena.parameters[part]
    if rule.clip_norm is not None:
        native.update.use_sums(arena.divisor)
    kept = header, slots, arena.divisor
    start = update_init(communicator, gradients, parameters, native.update, kept)
    keeps, summed = options.current().check_numerics, _header_of(frame, node)
    norm = [i for i in node.control if i in frame.received]

    def run() -> None:
        for i in norm:
            end(frame, i)  # the host sets the divisor then
        if arena.loaded:
            end(frame, summed)  # until then, others may read the old slots
            plan.settle(arena)
        checksum = frame.checksums.get(id(plan))
        native.prepare(arena.number)
        native.update.expect(b"" if checksum is None else checksum.sums, keeps)
        frame.works[node.id] = start()

    return run


def _header_of(frame: Frame, node: Node) -> int:
    """Find the instruction that reduces the header of an update's arena."""
    made = (each.node for each in frame.program.instructions)
    return next(
        each.id
        for each in made
        if each.op == "all_reduce_bucket"
        and each.attrs["plan"] is node.attrs["plan"]
        and each.attrs["bucket"].has_header
    )


def reduce_scatter_bucket(frame: Frame, node: Node) -> Step:
    """Return the function that starts a bucket's reduce_scatter."""
    arena, slices, communicator = frame.arena(node), _slices(frame, node), frame.communicator
    gradients, sums = arena.gradients[slices.whole], arena.sums[node.attrs["bucket"].index]

    def run() -> None:
        frame.works[node.id] = communicator.reduce_scatter(
            gradients, counts=slices.counts, out=sums, async_op=True
        )

    return run


def update_own(frame: Frame, node: Node) -> Step:
    """Return the update of the own slice."""
    arena, rule, bucket = frame.arena(node), node.attrs["rule"], node.attrs["bucket"]
    own, checksum, plan = _slices(frame, node).own, frame.checksum(node), node.attrs["plan"]
    count = arena.count if rule.clip_norm is None else arena.divisor
    sums = own_sums(frame, node, bucket, node.attrs["mode"])
    parameters = arena.parameters[own]
    slots = {name: array[own] for name, array in arena.slots.items()}
    update = rule.bucket_update(_own_paths(bucket, arena.layout, own))

    def run() -> None:
        if arena.loaded:  # others have read the old slots, as they have begun this step
            plan.settle(arena)
        begin_update(arena, checksum, bucket.has_header)
        update(parameters, sums, slots, count, arena.iterations)

    return run


def own_sums(frame: Frame, node: Node, bucket: Bucket, mode: ShardMode) -> np.ndarray:
    """Return this member's slice of a bucket's reduced gradients."""
    arena = frame.arena(node)
    if mode is ShardMode.SCATTERED:
        return arena.sums[bucket.index]
    return arena.gradients[Slices(bucket, arena.layout, frame.communicator).own]


def _own_paths(bucket: Bucket, layout: Layout, own: slice) -> list[tuple[str, slice]]:
    """List the variables in the own slice, and their ranges of it."""
    shift, found = own.start - bucket.parameters_start, []
    for path, part in bucket.paths(layout):
        low, high = max(part.start - shift, 0), min(part.stop - shift, own.stop - own.start)
        if low < high:
            found.append((path, slice(low, high)))
    return found


def all_gather_bucket(frame: Frame, node: Node) -> Step:
    """Return a function that starts to distribute a bucket's new parameters."""
    arena, slices, communicator = frame.arena(node), _slices(frame, node), frame.communicator
    parameters, own = arena.parameters[slices.whole], arena.parameters[slices.own]

    def run() -> None:
        frame.works[node.id] = communicator.all_gather(
            own, counts=slices.counts, out=parameters, async_op=True
        )

    return run


def _slices(frame: Frame, node: Node) -> Slices:
    """Return the slices of an instruction's bucket."""
    return Slices(node.attrs["bucket"], frame.arena(node).layout, frame.communicator)


def gradient_norm(frame: Frame, node: Node) -> Step:
    """Return the function that measures gradients that each replica has as a whole."""
    arena, rule = frame.arena(node), node.attrs["rule"]
    gradients = arena.gradients[arena.layout.header :]
    assert node.device is not None, node
    device = frame.device(node.device)
    frame.queues.rehearse(node, device.clip, arena.divisor, gradients, arena.count, rule.clip_norm)
    clip = frame.queues.on(node, device.clip)

    def run() -> None:
        clip(arena.divisor, gradients, arena.count, rule.clip_norm)

    return run


def all_reduce_norm(frame: Frame, node: Node) -> Step:
    """Return the function that measures the own slices and starts to add up all members'."""
    arena, rule, plan = frame.arena(node), node.attrs["rule"], node.attrs["plan"]
    modes, nodes = plan.sharded, frame.facts.nodes
    # The last node of each bucket: the sum of the header alone precedes that of its bucket.
    reduced = {
        nodes[i].attrs["bucket"].index: i for i in node.control if "bucket" in nodes[i].attrs
    }
    own = {
        reduced[each.index]: own_sums(frame, node, each, modes[each.index])
        for each in plan.buckets
        if each.index in modes
    }
    alike = [
        arena.gradients[each.parameters_start : each.stop]
        for each in plan.buckets
        if each.index not in modes
    ]
    total = np.zeros(1)
    start = frame.communicator.all_reduce_init(total, op="sum", out=total)
    frame.received[node.id] = lambda: set_divisor(
        *(arena.divisor, arena.count, total[0] + sum_of_squares(alike), rule.clip_norm)
    )

    def run() -> None:
        # Each slice as soon as it is reduced, while the caches have it: 2 of 28 ms for 80 MB.
        total[0] = 0
        for i in node.control:
            end(frame, i)
            if i in own:
                total[0] += sum_of_squares([own[i]])
        frame.works[node.id] = start()

    return run
