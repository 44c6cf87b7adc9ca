"""Plans of gather and scatter: all shares go by one lane, to or from the root.

The lane is the root's, if it has one: otherwise the shares change hands once more on its host.
"""

from __future__ import annotations

from allreduce.comm.hierarchical.shares import Shares, parts_of, total
from allreduce.comm.hierarchical.steps import Builder, Part


class _Way:
    """By which members all shares go.

    Args:
        build: The member's chain.
        shares: By member.
    """

    def __init__(self, build: Builder, shares: Shares) -> None:
        layout, root = build.layout, build.call.root
        assert root is not None, "a gather and a scatter have one"
        host, self.position = layout.places[root]
        self.lane = self.position if self.position < layout.lanes else 0
        self.passes = self.lane != self.position  # on the root's host
        self.carries, self.here = build.position == self.lane, build.host == host
        self.is_root = build.me == root
        self.root = layout.lane(self.lane).index(host)  # its host's number in the lane
        hosts = [layout.hosts[each] for each in layout.lane(self.lane)]
        # All members, host by host, and the elements of each host; those of this host's members.
        self.order = [member for members in hosts for member in members]
        self.counts = [total(shares, members) for members in hosts]
        self.local = [shares[mate].count for mate in build.mates]


def gather(build: Builder, shares: Shares, mine: Part) -> None:
    """Gather within hosts at the lane's members, then at the root's host, then at the root.

    Args:
        build: The member's chain.
        shares: In `out` of the root, by member.
        mine: This member's, in `x`.
    """
    way = _Way(build, shares)
    whole, local = sum(way.counts), sum(way.local)
    held = mine
    if len(build.mates) > 1:
        held = build.room(local if way.carries else 0)
        target = held if way.carries else None
        build.step("in", "gather", local, mine, target, root=way.lane, counts=way.local)
    joined = build.room(whole if way.carries and way.here else 0)
    if way.carries:
        target = joined if way.here else None
        build.step("across", "gather", whole, held, target, root=way.root, counts=way.counts)
    if way.here and way.passes:
        joined = _pass_on(build, "out", joined, whole, way.lane, way.position)
    if way.is_root:
        build.copy(*((part, shares[m]) for m, part in parts_of(joined, shares, way.order)))


def scatter(build: Builder, shares: Shares, mine: Part) -> None:
    """As gather, the other way round.

    Args:
        build: The member's chain.
        shares: In `x` of the root, by member.
        mine: This member's, in `out`.
    """
    way = _Way(build, shares)
    whole, local = sum(way.counts), sum(way.local)
    joined = build.room(whole if way.is_root else 0)
    if way.is_root:
        build.copy(*((shares[m], part) for m, part in parts_of(joined, shares, way.order)))
    if way.here and way.passes:
        joined = _pass_on(build, "in", joined, whole, way.position, way.lane)
    held = mine if len(build.mates) == 1 else build.room(local if way.carries else 0)
    if way.carries:
        source = joined if way.here else None
        build.step("across", "scatter", whole, source, held, root=way.root, counts=way.counts)
    if len(build.mates) > 1:
        source = held if way.carries else None
        build.step("out", "scatter", local, source, mine, root=way.lane, counts=way.local)


def _pass_on(build: Builder, level: str, held: Part, count: int, giver: int, taker: int) -> Part:
    """Bring what one member of the host has to another; returns where that one has it."""
    takes = build.position == taker
    taken = build.room(count if takes else 0)
    counts = [count if position == giver else 0 for position in range(len(build.mates))]
    target = taken if takes else None
    build.step(level, "gather", count, held, target, root=taker, counts=counts)
    return taken
