"""Chains of the collectives whose arrays have the same length on all members.

A chunk is split among lanes, each of which carries its share to the other hosts, as in Cho et al.,
"BlueConnect" (MLSys 2019), and in Horovod's hierarchical all-reduce. A small call uses one lane.
"""

from __future__ import annotations

from allreduce.comm.calls.call import item_bytes
from allreduce.comm.transports.hierarchical.steps import ONE_LANE, Builder, Part, cut


class Lanes:
    """The lanes that carry a chunk, and their shares of it.

    Args:
        prefer: The position of the root, if there is one.
        small: Whether to use one lane.
    """

    def __init__(self, build: Builder, count: int, prefer: int, small: bool) -> None:
        lanes = build.layout.lanes
        self.only = (prefer if prefer < lanes else 0) if small or lanes == 1 else None
        used = range(lanes) if self.only is None else (self.only,)
        self.shares = dict(zip(used, cut(count, len(used)), strict=True))
        self.counts = [self.share(position) for position in range(len(build.mates))]
        self.carries = build.position in self.shares

    def share(self, position: int) -> int:
        start, stop = self.shares.get(position, (0, 0))
        return stop - start

    def across(self, build: Builder, host: int) -> int:
        """Return the index of a host's member in this member's lane."""
        return build.layout.lane(build.position).index(host)


def _lanes(build: Builder, count: int, prefer: int = 0) -> Lanes:
    whole = build.call.count * item_bytes(build.dtype)
    return Lanes(build, count, prefer, whole <= ONE_LANE)


def _gathered(build: Builder, lanes: Lanes, chunk: Part) -> tuple[Part, Part]:
    """Reduce within the host. Return this lane's share, and the place for its result."""
    source = Part("x", chunk.start, chunk.stop)
    if build.wide:
        wide = build.allocate(chunk.count)
        build.copy((source, wide))
        source = wide
    if len(build.mates) == 1:
        return source, source if build.wide else chunk
    mine = build.allocate(lanes.share(build.position))
    if lanes.only is None:
        build.step("in", "reduce_scatter", chunk.count, source, mine, counts=lanes.counts)
    else:
        target = mine if lanes.carries else None
        build.step("in", "reduce", chunk.count, source, target, root=lanes.only)
    return mine, mine


def all_reduce(build: Builder, chunk: Part) -> None:
    """Reduce within hosts, then each lane across, then gather within hosts."""
    lanes = _lanes(build, chunk.count)
    mine, reduced = _gathered(build, lanes, chunk)
    if lanes.carries:
        build.step("across", "all_reduce", mine.count, mine, reduced)
        build.divide(reduced)
    if len(build.mates) == 1:
        if build.wide:
            build.copy((reduced, chunk))
        return
    result = build.allocate(chunk.count) if build.wide else chunk
    _distribute(build, lanes, reduced, result)
    if build.wide:
        build.copy((result, chunk))


def _distribute(build: Builder, lanes: Lanes, mine: Part, result: Part) -> None:
    """Distribute the lanes' shares within the host."""
    if lanes.only is None:
        build.step("out", "all_gather", result.count, mine, result, counts=lanes.counts)
    else:
        source = mine if lanes.carries else result
        build.step("out", "broadcast", result.count, source, result, root=lanes.only)


def reduce(build: Builder, chunk: Part) -> None:
    """Reduce within hosts, then each lane to the root's host, then gather there."""
    assert build.call.root is not None, "a reduce has a root"
    host, position = build.layout.places[build.call.root]
    lanes = _lanes(build, chunk.count, position)
    mine, _ = _gathered(build, lanes, chunk)
    here, me_root = build.host == host, build.me == build.call.root
    alone = me_root and lanes.only == position  # nothing is left to gather
    into = chunk if alone and not build.wide else build.allocate(mine.count if here else 0)
    if lanes.carries:
        root = lanes.across(build, host)
        build.step("across", "reduce", mine.count, mine, into if here else None, root=root)
        if here:
            build.divide(into)
    if here and lanes.only != position:
        result = chunk if not build.wide else build.allocate(chunk.count if me_root else 0)
        target = result if me_root else None
        build.step("out", "gather", chunk.count, into, target, root=position, counts=lanes.counts)
        into = result
    if me_root and build.wide:
        build.copy((into, chunk))


def broadcast(build: Builder, chunk: Part) -> None:
    """Scatter the root's array to its host's carriers, then each lane across, then gather."""
    assert build.call.root is not None, "a broadcast has a root"
    host, position = build.layout.places[build.call.root]
    lanes = _lanes(build, chunk.count, position)
    here, me_root = build.host == host, build.me == build.call.root
    given = Part("x", chunk.start, chunk.stop)
    direct = lanes.only == position  # the root is the only carrier
    mine = given if me_root and direct else build.allocate(lanes.share(build.position))
    if len(build.mates) == 1:
        mine = given if me_root else chunk
    if here and not direct:
        source = given if me_root else None
        build.step("in", "scatter", chunk.count, source, mine, root=position, counts=lanes.counts)
    if lanes.carries:
        root = lanes.across(build, host)
        target = chunk if mine.array == "x" else mine
        build.step("across", "broadcast", mine.count, mine, target, root=root)
    if len(build.mates) > 1:
        _distribute(build, lanes, mine, chunk)
