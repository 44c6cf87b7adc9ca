"""Buckets that are updated in slices: what each member does, and what each has of the slots."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import numpy as np

from allreduce.comm import Communicator, exchange
from allreduce.comm.fused_update import part_of, updates
from allreduce.devices import options
from allreduce.graph.core import pass_switches
from allreduce.graph.update.host import Host
from allreduce.graph.update.update import UpdateRule
from allreduce.graph.update.zero_update import choose_way
from allreduce.reduction import Arena, Bucket, Layout, Way, is_large, slice_of

_NATIVE = ("float32", "float64")


def agree_to_shard(
    host: Host, rule: UpdateRule, layout: Layout, buckets: Sequence[Bucket]
) -> dict[int, Way]:
    """Choose which buckets are updated in slices, by index, and how; all replicas do so together.

    None are where a rank has another optimizer, or layout, or wants none: as the updates begin,
    ranks hear of that which has to be alike.
    """
    first = host.replicas[0].communicator
    if first is None:
        return {}
    chosen: dict[int, Way] = {}
    wanted = pass_switches.is_on("shard") and (updates(first) or options.current().shard_everywhere)
    if wanted and _has_native(rule, layout):
        for each in buckets:
            if is_large(each, layout):
                maps = updates(first)
                chosen[each.index] = Way.MAPPED if maps else choose_way(first, layout, each)
    ways = [(index, way.value) for index, way in chosen.items()]
    told = json.dumps([ways, [(each.start, each.stop) for each in buckets], rule.slots])
    mine = np.asarray([zlib.crc32(told.encode())], np.int64)

    def differs(index: int) -> bool:
        communicator = host.replicas[index].communicator
        assert communicator is not None, "one of several"
        return bool((exchange(communicator, "what is updated in slices", mine) != mine).any())

    return {} if any(host.on_replicas(differs)) else chosen


def _has_native(rule: UpdateRule, layout: Layout) -> bool:
    """Say whether a rule keeps something, and native code can update for it."""
    if not rule.slots or layout.dtype.name not in _NATIVE or not _is_of_its_update(rule):
        return False
    nothing = dict.fromkeys(rule.slots, np.zeros(0, layout.dtype))
    return rule.native(np.zeros(1, layout.dtype), nothing) is not None


def _is_of_its_update(rule: UpdateRule) -> bool:
    """Say whether a rule's native update is that of its `update`, and of no base's."""
    classes = type(rule).__mro__
    native, update = (
        next(place for place, each in enumerate(classes) if name in vars(each))
        for name in ("native", "update")
    )
    return native <= update and "update" not in getattr(rule, "__dict__", ())


class EveryonesSlots:
    """The slots of all members, in memory that all of them map.

    What a member has of a bucket that is updated in slices is valid in its own slice alone.
    Reading the others' takes no communication: they change it in a step's updates only, each of
    which waits for this member. It stays there after they have gone, or their communicator has.

    Args:
        communicator: Has one member per replica.
        arena: This member's.
    """

    def __init__(self, communicator: Communicator, arena: Arena) -> None:
        self._slots = [
            {name: part_of(communicator, own, member) for name, own in arena.slots.items()}
            for member in range(communicator.size)
        ]

    def whole(self, own: Arena, layout: Layout, buckets: Sequence[Bucket]) -> dict[str, np.ndarray]:
        """Copy the slots, with what each member has of these buckets.

        Args:
            own: This member's, for the rest.
            layout: Where the variables lie.
            buckets: Those that are updated in slices.
        """
        found = {name: array.copy() for name, array in own.slots.items()}
        for bucket in buckets:
            for member, slots in enumerate(self._slots):
                part = slice_of(bucket, layout, len(self._slots), member)
                for name, array in slots.items():
                    found[name][part] = array[part]
        return found
