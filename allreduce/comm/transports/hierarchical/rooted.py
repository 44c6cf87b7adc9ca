"""Plans of gather and scatter: all shares go by one lane, to or from the root.

The lane is the root's, if it has one: otherwise the shares change hands once more on its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allreduce.comm.transports.hierarchical.shares import Shares, parts_of, total
from allreduce.comm.transports.hierarchical.steps import Builder, Part


@dataclass(frozen=True)
class _Leg:
    """A part of the way, as a gather has it; a scatter goes all of them the other way round.

    Args:
        level: Where it is gone.
        root: Who has the whole, by its number there.
        counts: The elements of each member.
        piece: This member's.
        whole: All of them, where this member is the root.
    """

    level: str
    root: int
    counts: Sequence[int]
    piece: Part
    whole: Part | None


class _Way:
    """By which members all shares go.

    Args:
        build: The member's chain.
        shares: By member.
        mine: This member's.
    """

    def __init__(self, build: Builder, shares: Shares, mine: Part) -> None:
        layout, root = build.layout, build.call.root
        assert root is not None, "a gather and a scatter have one"
        host, position = layout.places[root]
        lane = position if position < layout.lanes else 0
        carries, here = build.position == lane, build.host == host
        hosts = [layout.hosts[each] for each in layout.lane(lane)]
        counts = [total(shares, members) for members in hosts]
        held = mine
        self.legs: list[_Leg] = []
        if len(build.mates) > 1:
            local = [shares[mate].count for mate in build.mates]
            held = build.room(sum(local) if carries else 0)
            self.legs.append(_Leg("in", lane, local, mine, held if carries else None))
        joined = build.room(sum(counts) if carries and here else 0)
        if carries:  # the root's host has a number of its own in the lane
            to = layout.lane(lane).index(host)
            self.legs.append(_Leg("across", to, counts, held, joined if here else None))
        self.is_root = build.me == root
        if here and lane != position:
            passed = [sum(counts) if mate == lane else 0 for mate in range(len(build.mates))]
            final = build.room(sum(counts) if self.is_root else 0)
            self.legs.append(_Leg("out", position, passed, joined, final if self.is_root else None))
            joined = final
        # What the root has of each member: host by host, and where it belongs.
        order = [member for members in hosts for member in members] if self.is_root else []
        self.pairs = [(part, shares[member]) for member, part in parts_of(joined, shares, order)]


def gather(build: Builder, shares: Shares, mine: Part) -> None:
    """Gather within hosts at the lane's members, then at the root's host, then at the root.

    Args:
        build: The member's chain.
        shares: In `out` of the root, by member.
        mine: This member's, in `x`.
    """
    way = _Way(build, shares, mine)
    for leg in way.legs:
        count = sum(leg.counts)
        build.step(
            leg.level, "gather", count, leg.piece, leg.whole, root=leg.root, counts=leg.counts
        )
    build.copy(*way.pairs)


def scatter(build: Builder, shares: Shares, mine: Part) -> None:
    """As gather, the other way round.

    Args:
        build: The member's chain.
        shares: In `x` of the root, by member.
        mine: This member's, in `out`.
    """
    way = _Way(build, shares, mine)
    build.copy(*((given, part) for part, given in way.pairs))
    for leg in reversed(way.legs):
        level = {"in": "out", "out": "in"}.get(leg.level, leg.level)
        count = sum(leg.counts)
        build.step(level, "scatter", count, leg.whole, leg.piece, root=leg.root, counts=leg.counts)
