"""Communicators of some of a communicator's members: by color, by rank, per host and across hosts.

What is made is as independent of its parent as of its siblings: it has its own memory or
connections, its own order of calls and its own end. Only the store is the parent's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allreduce.comm import objects
from allreduce.comm.checks import Context, is_whole
from allreduce.comm.collectives import Collectives
from allreduce.comm.home import Home
from allreduce.errors import MismatchError, UnsupportedError, UsageError, everywhere

if TYPE_CHECKING:
    from allreduce.comm.communicator import Communicator


class Groups(Collectives):
    """A communicator that others can be made from."""

    _placing: threading.Lock  # held by the thread that makes one of these:
    _local: Communicator | None = None
    _across: Communicator | None = None

    def split(
        self, color: int | None, key: int = 0, *, transport: str | None = None
    ) -> Communicator | None:
        """Make a communicator for each color, of the members that named it; a collective call.

        What is made belongs to the caller, who closes it; parents and parts are closed in any
        order.

        Args:
            color: Members that name the same number come together; None for no part.
            key: Members of a part are numbered by key, then by rank here.
            transport: What carries the parts' calls; as here without it. The same on all members.

        Returns:
            This member's part, or None without a color.

        Raises:
            MismatchError: Members name different transports.
            UnsupportedError: Members are replicas of which a process may have several.
        """
        home = self._base("split")
        where = f"{self._where}: split"
        if color is not None and not _is_word(color):
            raise UsageError(f"{where} got color={color!r}; expected a whole number, or None")
        if not _is_word(key):
            raise UsageError(f"{where} got key={key!r}; expected a whole number")
        mine = [None if color is None else int(color), int(key), transport]
        context = self._context("split")
        calls = functools.partial(_divide, self, context, home, mine)
        found = self._compound(context, calls)
        if found is None:
            return None
        ranks, name = found
        return home.make(ranks, name, transport)

    def group(self, ranks: Sequence[int], *, transport: str | None = None) -> Communicator | None:
        """Make a communicator of some members; a collective call of these alone.

        Others may call, too, and get None at once: where every rank makes the same list of groups,
        each gets its own ones.

        Args:
            ranks: The members, by their ranks here, in the order of their ranks there; the same on
                all of them.
            transport: What carries its calls; as here without it. The same on all of them.

        Raises:
            UsageError: There is no such rank, or one comes twice.
            MismatchError: Members name different transports.
            TimeoutError: A member did not come, or waits in another group; the message names it.
            PeerLostError: A member has died.
            UnsupportedError: Members are replicas of which a process may have several.
        """
        home = self._base("group")
        listed = tuple(ranks) if isinstance(ranks, Sequence | range) else None
        if not listed or not all(is_whole(rank) and 0 <= rank < self.size for rank in listed):
            raise UsageError(
                f"{self._where}: group got ranks={ranks!r}; expected a list of ranks from 0 to "
                f"{self.size - 1}"
            )
        if len(set(listed)) != len(listed):
            raise UsageError(f"{self._where}: group got ranks={ranks!r}; one of them comes twice")
        if self.rank not in listed:
            return None
        named = [int(rank) for rank in listed]
        return home.gather(self._where, named, "group", transport)

    @property
    def local(self) -> Communicator:
        """The members on this member's host; closed with this communicator.

        Made when it is first asked for: that is a collective call of its members.
        """
        home = self._base("local")
        with self._placing:
            if self._local is None or self._local.closed:
                self._local = home.gather(self._where, _host(home, self.rank), "local")
            return self._local

    @property
    def across(self) -> Communicator:
        """One member per host: those with this member's place on their hosts; closed with this.

        Made when it is first asked for: that is a collective call of its members. Hosts with fewer
        members have none in the lanes of the last places.
        """
        home = self._base("across")
        with self._placing:
            if self._across is None or self._across.closed:
                place = _host(home, self.rank).index(self.rank)
                lane = sorted(ranks[place] for ranks in home.world.hosts if place < len(ranks))
                self._across = home.gather(self._where, lane, "across")
            return self._across

    def _base(self, call: str) -> Home:
        self._admit()
        self._check_open()
        if self._home is None or self._home.world.size != self.size:
            raise UnsupportedError(
                f"{self._where}: {call} makes communicators of processes, but here a process may "
                "have several members; use one of one member per process, as allreduce.init() "
                "makes it"
            )
        return self._home


def _divide(
    comm: Groups, context: Context, home: Home, mine: list[Any]
) -> tuple[list[int], str] | None:
    """Find the ranks of this member's color, in their order, and name their communicator.

    That is part of the call: of two threads' splits, all members number the same one first.
    """
    chosen = objects.all_gather(comm, context, mine)
    for rank, row in enumerate(chosen):
        if row[2] != chosen[0][2]:
            raise everywhere(
                MismatchError(
                    f"{context.where} got transport={chosen[0][2]!r} on member 0 but {row[2]!r} on "
                    f"member {rank}; name the same on all members"
                )
            )
    if mine[0] is None:
        return None
    ranks = [rank for rank, row in enumerate(chosen) if row[0] == mine[0]]
    ranks.sort(key=lambda rank: (chosen[rank][1], rank))
    return ranks, home.fresh(ranks, "split")


def _host(home: Home, rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in home.world.hosts if rank in ranks)


def _is_word(number: Any) -> bool:
    return is_whole(number) and -(1 << 63) <= number < 1 << 63
