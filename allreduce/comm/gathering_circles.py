"""Members that wait for each other in different groups: each for the next, the last for the first.

One of those who wait finds them in what all have left in the store, which is read piece by piece
while the others go on: what is found has to be true at one moment, and to stay so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from allreduce.comm.gathering_notes import Wanted


class Notes(Protocol):
    """What members have left in the store, as one of them reads it."""

    def wanted_by(self, rank: int) -> Wanted | None:
        """Return what another member waits for, if its note tells it."""

    def has_come(self, wanted: Wanted, rank: int) -> bool:
        """Say whether a member has arrived at an attempt."""

    def is_over(self, wanted: Wanted) -> bool:
        """Say whether an attempt has failed."""


def find(notes: Notes, me: int, wanted: Wanted, missing: Sequence[int]) -> dict[int, Wanted]:
    """Find a circle for whose members this one waits, as one of them or not.

    Args:
        notes: What members have left.
        me: This member.
        wanted: What it waits for.
        missing: Who has not come to that.

    Returns:
        What each member of the circle waits for, each before the one that it waits for; empty if
        there is none.
    """
    waiting = _waiting(notes, me, wanted, missing)
    circle = _circle(notes, me, waiting) if len(waiting) > 1 else []
    still = all(_waits_still(notes, me, rank, waiting[rank]) for rank in circle)
    return {rank: waiting[rank] for rank in circle} if still else {}


def _waiting(notes: Notes, me: int, wanted: Wanted, missing: Sequence[int]) -> dict[int, Wanted]:
    """Read what the absent ones wait for, and those whom they wait for, and so on.

    Who still waits in an attempt that has failed is about to raise, and to go on.
    """
    waiting, ahead = {me: wanted}, list(missing)
    while ahead:
        rank = ahead.pop()
        other = None if rank in waiting else notes.wanted_by(rank)
        if other is not None and not notes.is_over(other):
            waiting[rank] = other
            ahead += other.ranks
    return waiting


def _circle(notes: Notes, me: int, waiting: Mapping[int, Wanted]) -> list[int]:
    """Find members of which each waits for the next, and for whom this one waits in the end.

    Who has arrived is asked after all notes were read: a member whose group lacks somebody then
    still waits in it, so that what is found was true at one moment, and stays so.
    """
    needs = {
        rank: [
            other
            for other in one.ranks
            if other in waiting and other != rank and not notes.has_come(one, other)
        ]
        for rank, one in waiting.items()
    }
    while free := [rank for rank in needs if needs.keys().isdisjoint(needs[rank])]:
        for rank in free:
            del needs[rank]
    path: list[int] = []
    rank = me
    while rank in needs and rank not in path:
        path.append(rank)
        rank = next(other for other in needs[rank] if other in needs)
    return path[path.index(rank) :] if path else []


def _waits_still(notes: Notes, me: int, rank: int, wanted: Wanted) -> bool:
    """Say whether a member waits for the same as when its note was read.

    Else those who seem not to have come to it may have, and been forgotten, or have gone on from
    what has failed meanwhile.
    """
    still = rank == me or notes.wanted_by(rank) == wanted
    return still and not notes.is_over(wanted)
