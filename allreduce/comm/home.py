"""What a communicator keeps of where it comes from: its part of the store, and how groups are made.

Whatever members leave in the store for a communicator lies in a part of its own, which is removed
when all of them have closed it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from allreduce.cluster import World
from allreduce.comm import engine
from allreduce.comm.gathering import Gathering
from allreduce.comm.sites import place, text

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
        made = f"group({list(ranks)})" if kind == "group" else f"{kind}, of ranks {list(ranks)},"
        call, alive, met = f"{made} at {text(*place())}", self.check_alive, False
        while not met:
            name = self.fresh(ranks, kind)
            group = self.world.subset(ranks, name)
            with engine.going_on():
                gathering = Gathering(where, self.world, group, ranks, call, transport, alive)
                met = gathering.meet(self.timeout)
        return self.make(ranks, name, transport)

    def fresh(self, ranks: Sequence[int], kind: str) -> str:
        """Return the name of a new communicator, or of an attempt: the same on all members."""
        chosen = (kind, tuple(ranks))
        self._made[chosen] += 1
        return f"{self.name}/{kind}.{self._made[chosen]}"

    def make(self, ranks: Sequence[int], name: str, transport: str | None = None) -> Communicator:
        """Make the communicator of these ranks, who have met."""
        world = self.world.subset(ranks, name)
        return self.open(world, name=name, timeout=self.timeout, transport=transport)
