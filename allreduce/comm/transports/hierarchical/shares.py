"""Chains of reduce_scatter and all_gather, which split or join the members' shares.

A lane carries the shares of some members of each host (`Layout.carried`), in the order of the
lane's hosts: working memory holds them lane by lane, and copies bring them from and into the order
of members.
"""

from __future__ import annotations

from collections.abc import Sequence

from allreduce.comm.transports.hierarchical.steps import Builder, Part, shifted

Shares = Sequence[Part]  # of every member, in the joined array


def _order(build: Builder, lane: int) -> list[int]:
    """Return the members whose shares a lane carries, in the lane's order."""
    hosts = build.layout.lane(lane)
    return [member for host in hosts for member in build.layout.carried(host, lane)]


def total(shares: Shares, members: Sequence[int]) -> int:
    return sum(shares[member].count for member in members)


def _by_host(build: Builder, lane: int, shares: Shares) -> list[int]:
    """Return the elements of each host that a lane carries."""
    return [total(shares, build.layout.carried(host, lane)) for host in build.layout.lane(lane)]


def _by_position(build: Builder, shares: Shares) -> list[int]:
    """Return the elements that each member of this host carries, of all hosts."""
    lanes = build.layout.lanes
    return [
        total(shares, _order(build, position)) if position < lanes else 0
        for position in range(len(build.mates))
    ]


def _every_lane(build: Builder) -> list[int]:
    return [member for lane in range(build.layout.lanes) for member in _order(build, lane)]


def parts_of(whole: Part, shares: Shares, members: Sequence[int]) -> list[tuple[int, Part]]:
    counts = [shares[member].count for member in members]
    return list(zip(members, shifted(whole, counts), strict=True))


def reduce_scatter(build: Builder, shares: Shares, mine: Part) -> None:
    """Reduce within hosts, for the carriers, then across lanes; the carriers hand shares on.

    Args:
        shares: In `x`, by member.
        mine: This member's, in `out`.
    """
    order = _every_lane(build)
    sorted_x = build.allocate(total(shares, order))
    build.copy(*((shares[member], part) for member, part in parts_of(sorted_x, shares, order)))
    held, lanes, position = sorted_x, build.layout.lanes, build.position
    if len(build.mates) > 1:
        counts = _by_position(build, shares)
        held = build.allocate(counts[position])
        build.step("in", "reduce_scatter", sum(counts), sorted_x, held, counts=counts)
    hands_on = len(build.mates) > lanes
    own = build.layout.carried(build.host, position) if position < lanes else ()
    result = mine if not (hands_on or build.wide) else build.allocate(total(shares, own))
    if position < lanes:
        counts = _by_host(build, position, shares)
        build.step("across", "reduce_scatter", sum(counts), held, result, counts=counts)
        build.divide(result)
    if hands_on:
        final = build.allocate(mine.count) if build.wide else mine
        _hand_on(build, shares, result, final)
        result = final
    if build.wide:
        build.copy((result, mine))


def _hand_on(build: Builder, shares: Shares, source: Part, target: Part) -> None:
    """Give every member of the host its share, which its carrier has."""
    lanes, position = build.layout.lanes, build.position
    counts = [
        shares[mate].count if number % lanes == position else 0
        for number, mate in enumerate(build.mates)
    ]
    receives = [0] * len(build.mates)
    receives[position % lanes] = target.count
    build.step("out", "all_to_all", 0, source, target, counts=counts, receives=receives)


def all_gather(build: Builder, shares: Shares, mine: Part) -> None:
    """Collect shares at the carriers, gather across lanes, then within hosts.

    Args:
        shares: In `out`, by member.
        mine: This member's, in `x`.
    """
    lanes, position, held = build.layout.lanes, build.position, mine
    own = build.layout.carried(build.host, position) if position < lanes else ()
    if len(build.mates) > lanes:
        held = build.allocate(total(shares, own))
        counts = [0] * len(build.mates)
        counts[position % lanes] = mine.count
        receives = [shares[mate].count if mate in own else 0 for mate in build.mates]
        build.step("in", "all_to_all", 0, mine, held, counts=counts, receives=receives)
    joined = build.allocate(total(shares, _order(build, position)) if position < lanes else 0)
    if position < lanes:
        counts = _by_host(build, position, shares)
        build.step("across", "all_gather", sum(counts), held, joined, counts=counts)
    if len(build.mates) > 1:
        counts = _by_position(build, shares)
        whole = build.allocate(sum(counts))
        build.step("out", "all_gather", sum(counts), joined, whole, counts=counts)
        joined = whole
    parts = parts_of(joined, shares, _every_lane(build))
    build.copy(*((part, shares[member]) for member, part in parts))
