"""Which members share a host, and which of them talk to other hosts.

A *lane* is one member of every host: the members of one position on their hosts. There are as many
lanes as the smallest host has members; on larger hosts the further members have no lane.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Layout:
    """The members of a communicator, by host.

    Args:
        hosts: The members on each host, ascending; the hosts in the order of their first members.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, machines: Sequence[Hashable]) -> Layout:
        """Lay members out.

        Args:
            machines: The identity of each member's host.
        """
        found: dict[Hashable, list[int]] = {}
        for member, machine in enumerate(machines):
            found.setdefault(machine, []).append(member)
        return cls(tuple(tuple(members) for members in found.values()))

    @cached_property
    def size(self) -> int:
        """How many members there are."""
        return sum(len(members) for members in self.hosts)

    @cached_property
    def lanes(self) -> int:
        """How many lanes there are."""
        return min(len(members) for members in self.hosts)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Each member's host, and its position there."""
        found = {
            member: (host, position)
            for host, members in enumerate(self.hosts)
            for position, member in enumerate(members)
        }
        return tuple(found[member] for member in range(self.size))

    def lane(self, number: int) -> tuple[int, ...]:
        """Return a lane's hosts in the order of its members, which is that of their numbers."""
        return tuple(sorted(range(len(self.hosts)), key=lambda host: self.hosts[host][number]))

    def carried(self, host: int, lane: int) -> tuple[int, ...]:
        """Return the members of a host whose shares a lane carries: every so many of them."""
        return self.hosts[host][lane :: self.lanes]
