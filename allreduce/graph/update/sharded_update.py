"""Choose the buckets with sharded updates, and read the sharded slots of all members.

Over transports that do not map memory, each member has the slots of its own slices only, until
`consolidate` gathers them. Source: Rajbhandari et al., ZeRO: Memory optimizations toward training
trillion parameter models (SC 2020).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from allreduce.comm import Communicator, exchange
from allreduce.comm.fused_update import part_of, updates
from allreduce.devices import options
from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.core import pass_switches
from allreduce.graph.update.update import LocalReplicas, UpdateRule
from allreduce.reduction import Arena, Bucket, Layout, ShardMode, is_large, slice_of

_NATIVE = ("float32", "float64")


def agree_to_shard(
    host: LocalReplicas,
    rule: UpdateRule,
    layout: Layout,
    buckets: Sequence[Bucket],
    device: DeviceName,
) -> dict[int, ShardMode]:
    """Choose the buckets with sharded updates, and their modes, by index; all replicas call this.

    The result is empty if ranks differ in the optimizer, the layout or their options. The first
    update reports differences that are errors.
    """
    first = host.replicas[0].communicator
    if first is None:
        return {}
    chosen: dict[int, ShardMode] = {}
    given = options.current()
    # Slices are exchanged in float32, and updated by native code.
    usual = updates(first) and given.mixed_precision is None
    asked = (usual or given.shard_everywhere) and device.on_host
    wanted = pass_switches.is_on("shard") and asked
    if wanted and _has_native(rule, layout):
        fuses = updates(first) and rule.updates_at_once
        for each in buckets:
            if is_large(each, layout):
                chosen[each.index] = ShardMode.MAPPED if fuses else choose_mode(first, layout, each)
    modes = [(index, mode.value) for index, mode in chosen.items()]
    chosen_text = json.dumps([modes, [(each.start, each.stop) for each in buckets], rule.all_slots])
    mine = np.asarray([zlib.crc32(chosen_text.encode())], np.int64)

    def differs(index: int) -> bool:
        communicator = host.replicas[index].communicator
        assert communicator is not None, "one of several"
        return bool((exchange(communicator, "what is updated in slices", mine) != mine).any())

    return {} if any(host.on_replicas(differs)) else chosen


def _has_native(rule: UpdateRule, layout: Layout) -> bool:
    """Return whether a rule has slots and a native update."""
    if (
        not rule.is_elementwise
        or not rule.all_slots
        or layout.dtype.name not in _NATIVE
        or not _is_of_its_update(rule)
    ):
        return False
    nothing = dict.fromkeys(rule.all_slots, np.zeros(0, layout.dtype))
    return rule.native(np.zeros(1, layout.dtype), nothing) is not None


def _is_of_its_update(rule: UpdateRule) -> bool:
    """Return whether no subclass overrides `update` without `native`."""
    classes = type(rule).__mro__
    native, update = (
        next(place for place, each in enumerate(classes) if name in vars(each))
        for name in ("native", "update")
    )
    return native <= update and "update" not in getattr(rule, "__dict__", ())


def mapped_slots(communicator: Communicator, arena: Arena) -> list[dict[str, np.ndarray]]:
    """Return the slots of each member, in memory that all of them map.

    Reading the other members' slots needs no communication: they change only in a step's updates,
    each of which waits for this member. The memory stays mapped after members or the communicator
    have ended.
    """
    return [
        {name: part_of(communicator, own, member) for name, own in arena.slots.items()}
        for member in range(communicator.size)
    ]


class Slices:
    """The slices of a bucket, one per member.

    Args:
        bucket: The bucket, with or without its header.
        layout: The arena's layout.
        communicator: The replicas' communicator.
    """

    def __init__(self, bucket: Bucket, layout: Layout, communicator: Communicator) -> None:
        size = communicator.size
        each = [slice_of(bucket, layout, size, member) for member in range(size)]
        self.whole = slice(bucket.parameters_start, bucket.stop)
        self.own = each[communicator.rank]
        self.counts = [part.stop - part.start for part in each]


def choose_mode(communicator: Communicator, layout: Layout, bucket: Bucket) -> ShardMode:
    """Choose how members sum a bucket that each then updates its slice of.

    A reduce_scatter moves fewer bytes. Its results equal an all_reduce's bit for bit with two
    members, in shared memory, and if both use the same ring and slices. Otherwise the header must
    travel with its bucket, or fractional sample counts would be added in another order.
    """
    if communicator.size == 2 or communicator.transport == "shared":
        return ShardMode.SCATTERED
    if bucket.has_header:
        return ShardMode.SUMMED
    counts = Slices(bucket, layout, communicator).counts
    gradients = np.empty(sum(counts), layout.dtype)
    modes = {
        communicator.plan("all_reduce", gradients).algorithm,
        communicator.plan("reduce_scatter", gradients, counts=counts).algorithm,
    }
    rings = communicator.transport == "tcp" and modes == {"chain"}
    return ShardMode.SCATTERED if rings else ShardMode.SUMMED


def sharded_slots_error() -> UsageError:
    """Return the error for saving slots that this process does not have."""
    return UsageError(
        "each rank has only its own slices of this optimizer's slots, because of "
        "ar.config.set_shard_everywhere(True); call optimizer.consolidate() on every rank after "
        "the last step, then save or read the state on any rank (the slices of a rank that has "
        "died are lost; model.save_weights saves the weights)"
    )


def gather_slots(communicator: Communicator, arena: Arena, buckets: Sequence[Bucket]) -> None:
    """Gather the slots of all members; all members call this."""
    for bucket in buckets:
        slices = Slices(bucket, arena.layout, communicator)
        for array in arena.slots.values():
            out = array[slices.whole]
            communicator.all_gather(array[slices.own], counts=slices.counts, out=out)


def joined_slots(
    own: Arena, members: Sequence[Mapping[str, np.ndarray]], buckets: Sequence[Bucket]
) -> dict[str, np.ndarray]:
    """Copy the slots, with each member's slices of sharded buckets, where only they are valid.

    Args:
        own: This member's arena, for the other buckets.
        members: The slots of each member.
        buckets: The sharded buckets.
    """
    found = {name: array.copy() for name, array in own.slots.items()}
    for bucket in buckets:
        for member, slots in enumerate(members):
            part = slice_of(bucket, own.layout, len(members), member)
            for name, array in slots.items():
                found[name][part] = array[part]
    return found
