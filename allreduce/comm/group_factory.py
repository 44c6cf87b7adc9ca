"""Make communicators of some of a communicator's members: by color, by rank, by host.

A group is as independent of its parent as of its siblings: it has its own memory or connections,
its own order of calls and its own end. Only the store is the parent's: each communicator has a
part of it, which is removed when all members have closed the communicator.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from allreduce.cluster import World
from allreduce.comm import objects
from allreduce.comm.arguments.checks import Context, is_whole
from allreduce.comm.calls.call_site import place, text
from allreduce.comm.core import progress
from allreduce.comm.dispatch import Dispatcher
from allreduce.comm.group_rendezvous import Rendezvous
from allreduce.errors import MismatchError, UnsupportedError, UsageError, everywhere


class StorePart:
    """A communicator's part of the store, shared by this process's members."""

    def __init__(self, world: World, name: str, members: int) -> None:
        self.world = world.subset(range(world.size), name)
        self._members = members
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Close it once the last member of this process has left."""
        with self._lock:
            self._members -= 1
            last = self._members == 0
        if last:
            self.world.close()


class Closable(Protocol):
    """A communicator, as far as the factory uses it."""

    @property
    def closed(self) -> bool: ...
    def _close(self, drain: bool) -> None: ...


C = TypeVar("C", bound=Closable)
C_co = TypeVar("C_co", bound=Closable, covariant=True)


class OpenMember(Protocol[C_co]):
    """Opens this process's member of a communicator; by default on the parent's transport."""

    def __call__(
        self, world: World, *, name: str, timeout: float, transport: str | None
    ) -> C_co: ...


class GroupFactory(Generic[C]):
    """Makes the groups of one communicator.

    Args:
        world: The communicator's processes, in the order of its members if each has one.
        timeout: The communicator's and its groups', in seconds.
        open: Opens a communicator of another world.
    """

    def __init__(
        self,
        world: World,
        part: StorePart,
        dispatch: Dispatcher,
        timeout: float,
        open: OpenMember[C],
    ) -> None:
        self.part = part
        self._world, self._dispatch, self._timeout = world, dispatch, timeout
        self._open, self._check_alive = open, dispatch.transport.check_alive
        self._making = threading.Lock()  # held by the thread that makes `local` or `across`
        self._cached: dict[str, C] = {}
        # How many were made, by kind and members, because each member knows only its own groups.
        self._made: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def split(self, color: Any, key: Any, transport: str | None) -> C | None:
        """Make this member's part of a split; see `Communicator.split`."""
        self._admit("split")
        context = self._dispatch.context("split")
        if color is not None and not _fits_64_bits(color):
            raise UsageError(
                f"{context.where} got color={color!r}; expected a whole number, or None"
            )
        if not _fits_64_bits(key):
            raise UsageError(f"{context.where} got key={key!r}; expected a whole number")
        mine = [None if color is None else int(color), int(key), transport]
        found = self._dispatch.compound(context, functools.partial(self._divide, context, mine))
        return None if found is None else self._make(*found, transport)

    def group(self, ranks: Any, transport: str | None) -> C | None:
        """Make the communicator of these ranks; see `Communicator.group`."""
        self._admit("group")
        where, size = self._dispatch.where, self._dispatch.size
        listed = tuple(ranks) if isinstance(ranks, Sequence | range) else None
        if not listed or not all(is_whole(rank) and 0 <= rank < size for rank in listed):
            raise UsageError(
                f"{where}: group got ranks={ranks!r}; expected a list of ranks from 0 to {size - 1}"
            )
        if len(set(listed)) != len(listed):
            raise UsageError(f"{where}: group got ranks={ranks!r}; one of them comes twice")
        if self._dispatch.rank not in listed:
            return None
        return self._meet([int(rank) for rank in listed], "group", transport)

    def local(self) -> C:
        """Return the communicator of this member's host."""
        return self._once("local", lambda host: host)

    def across(self) -> C:
        """Return the communicator of the members that have this one's place on their hosts."""

        def lane(host: tuple[int, ...]) -> list[int]:
            place = host.index(self._dispatch.rank)
            return sorted(ranks[place] for ranks in self._world.hosts if place < len(ranks))

        return self._once("across", lane)

    def close(self, stack: contextlib.ExitStack, drain: bool, first: bool) -> None:
        """Have `stack` close `local` and `across`, if they were made, and leave the store.

        Args:
            drain: Whether their started calls complete.
            first: Whether this is the communicator's first close.
        """
        for kind in ("across", "local"):
            if kind in self._cached and not self._cached[kind].closed:
                stack.callback(self._cached[kind]._close, drain)
        if first:
            stack.callback(self.part.leave)

    def _once(self, kind: str, ranks: Callable[[tuple[int, ...]], Sequence[int]]) -> C:
        self._admit(kind)
        with self._making:
            made = self._cached.get(kind)
            if made is None or made.closed:
                mine = self._dispatch.rank
                host = next(listed for listed in self._world.hosts if mine in listed)
                made = self._cached[kind] = self._meet(ranks(host), kind)
            return made

    def _admit(self, call: str) -> None:
        self._dispatch.transport.admit()
        self._dispatch.check_open()
        if self._world.size != self._dispatch.size:
            raise UnsupportedError(
                f"{self._dispatch.where}: {call} makes communicators of processes, but here a "
                "process may have several members; use one of one member per process, as "
                "allreduce.init() makes it"
            )

    def _divide(self, context: Context, mine: list[Any]) -> tuple[list[int], str] | None:
        """Find the ranks of this member's color, in their order, and name their communicator.

        It is part of the call, so that of two threads' splits all members number the same first.
        """
        chosen = objects.all_gather_object(self._dispatch, context, mine)
        for rank, row in enumerate(chosen):
            if row[2] != chosen[0][2]:
                raise everywhere(
                    MismatchError(
                        f"{context.where} got transport={chosen[0][2]!r} on member 0 but "
                        f"{row[2]!r} on member {rank}; name the same on all members"
                    )
                )
        if mine[0] is None:
            return None
        ranks = [rank for rank, row in enumerate(chosen) if row[0] == mine[0]]
        ranks.sort(key=lambda rank: (chosen[rank][1], rank))
        return ranks, self._fresh(ranks, "split")

    def _meet(self, ranks: Sequence[int], kind: str, transport: str | None = None) -> C:
        """Make the communicator of these ranks, once all of them have called."""
        self._check_alive()
        made = f"group({list(ranks)})" if kind == "group" else f"{kind}, of ranks {list(ranks)},"
        call, where, met = f"{made} at {text(*place())}", self._dispatch.where, False
        while not met:
            name = self._fresh(ranks, kind)
            group = self._world.subset(ranks, name)
            with progress.background_progress():
                rendezvous = Rendezvous(
                    where, self._world, group, ranks, call, transport, self._check_alive
                )
                met = rendezvous.meet(self._timeout)
        return self._make(ranks, name, transport)

    def _fresh(self, ranks: Sequence[int], kind: str) -> str:
        """Return the name of a new communicator, or of an attempt: the same on all members."""
        chosen = (kind, tuple(ranks))
        self._made[chosen] += 1
        return f"{self._dispatch.name}/{kind}.{self._made[chosen]}"

    def _make(self, ranks: Sequence[int], name: str, transport: str | None) -> C:
        world = self._world.subset(ranks, name)
        return self._open(world, name=name, timeout=self._timeout, transport=transport)


def _fits_64_bits(number: Any) -> bool:
    return is_whole(number) and -(1 << 63) <= number < 1 << 63
