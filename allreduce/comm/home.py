"""What a communicator keeps of where it comes from: its part of the store, and how groups are made.

Whatever members leave in the store for a communicator lies in a part of its own, which is removed
when all of them have closed it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from allreduce.cluster import World
from allreduce.comm import engine, living
from allreduce.comm.gathering import Gathering

if TYPE_CHECKING:
    from allreduce.comm.communicator import Communicator


class Room:
    """A communicator's part of the store, until all of this process's members have left it.

    Args:
        world: The communicator's processes.
        name: Its name.
        members: How many members this process has.
    """

    def __init__(self, world: World, name: str, members: int) -> None:
        self.world = world.room(name)
        self._members = members
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Note that one of this process's members needs it no more."""
        with self._lock:
            self._members -= 1
            last = self._members == 0
        if last:
            self.world.close()


class Open(Protocol):
    """Opens this process's member of a communicator; without a transport as the parent's was."""

    def __call__(
        self, world: World, *, name: str, timeout: float, transport: str | None
    ) -> Communicator: ...


@dataclass
class Home:
    """What a communicator's groups are made from.

    Args:
        world: Its processes, in the order of its members if each has one.
        room: Its part of their store; groups have parts of their own, and may outlive it.
        name: Its name.
        timeout: Its own, and its groups'.
        open: Makes a communicator of another world.
        check_alive: Raises what has ended the communicator, if it has ended.
    """

    world: World
    room: Room
    name: str
    timeout: float
    open: Open
    check_alive: Callable[[], None]
    # How many were made: by their members, because each member knows of its own alone.
    _made: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    _gathering: Gathering = field(init=False)

    def __post_init__(self) -> None:
        self._gathering = Gathering(self.room.world, self.name, self.timeout, self.check_alive)
        living.add_leaver(self._gathering)
        # Nobody comes to a group by a communicator that was dropped. Its part of the store stays:
        # what its transport has started may still have to be told of there.
        weakref.finalize(self, _dropped, self._gathering, os.getpid()).atexit = False

    def gather(
        self, where: str, ranks: Sequence[int], kind: str, transport: str | None = None
    ) -> Communicator:
        """Make the communicator of these ranks, once all of them want it.

        Args:
            where: "[shared] rank 2", for messages.
            ranks: The members, of which this process is one.
            kind: "group", "local" or "across".
            transport: What carries its calls; as its parent's without it.
        """
        self.check_alive()
        number = self._made[kind, tuple(ranks)] + 1
        with engine.going_on():
            self._gathering.meet(where, kind, number, ranks, transport)
        return self.make(ranks, self.fresh(ranks, kind), transport)

    def leave(self, last: bool) -> None:
        """Tell those who still make groups that this member comes to none any more.

        Args:
            last: Whether nothing else of this member needs the store, either; said once.
        """
        self._gathering.leave()
        if last:
            self.room.leave()

    def fresh(self, ranks: Sequence[int], kind: str) -> str:
        """Return a new communicator's name, the same on all members that have met for it."""
        chosen = (kind, tuple(ranks))
        self._made[chosen] += 1
        return f"{self.name}/{kind}.{self._made[chosen]}"

    def make(self, ranks: Sequence[int], name: str, transport: str | None = None) -> Communicator:
        """Make the communicator of these ranks, who have met."""
        world = self.world.subset(ranks, name)
        return self.open(world, name=name, timeout=self.timeout, transport=transport)


def _dropped(gathering: Gathering, owner: int) -> None:
    if os.getpid() == owner:  # a child made by fork has the communicator, but is no member
        gathering.leave()
