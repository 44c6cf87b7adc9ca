"""What a world is: who takes part, and the store through which they meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from allreduce.cluster.host.address import LOOPBACK
from allreduce.cluster.host.waiting import Wait
from allreduce.cluster.store import LocalStore, Store, SubsetStore, rank_text, ranks_text
from allreduce.errors import PeerLostError, TimeoutError, UsageError

__all__ = [
    "LocalStore",
    "Member",
    "Store",
    "World",
    "generations",
    "lost",
    "rank_text",
    "ranks_text",
]

_MADE = "a communicator together"  # what exchanges are for; their keys tell people nothing
_REMEDY = "every rank has to make the same calls"
_NEWS_SECONDS = 0.5  # in which the store tells of a death that broke a connection


class Member(NamedTuple):
    """One process of a world."""

    rank: int
    host: str  # its name, for people
    pid: int
    machine: str = ""  # what tells hosts apart (cluster/host/machine.py)
    origin: int | None = None  # in a subset: its rank in the world that was joined

    @property
    def world_rank(self) -> int:
        """Its rank in the world that was joined, by which people know it."""
        return self.rank if self.origin is None else self.origin


class _Generations:
    """Counts this process's worlds: equal on all ranks, which join the same jobs together."""

    def __init__(self) -> None:
        self.next = 1

    def count(self) -> None:
        """Note that a join has succeeded; one that fails keeps its number for the next attempt."""
        self.next += 1


generations = _Generations()


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class World:
    """Who takes part. Immutable: a changed membership is a new World of a later generation."""

    generation: int
    rank: int
    size: int
    members: tuple[Member, ...]
    source: str  # the resolver that made it: "alone", "mpi", "leader" or "slurm"
    why: str  # the log line: which source won and why, and what was ignored
    job: str  # the job's unique hexadecimal id, equal on all ranks
    secret: bytes = field(repr=False)  # the job's secret, equal on all ranks
    store: Store = field(repr=False)
    # This machine's address towards the leader: by which others may reach this process.
    address: str = LOOPBACK
    farewell: Callable[[], None] = field(default=_nothing, repr=False)  # runs after the close

    @property
    def local_rank(self) -> int:
        """This member's position among the members on its host."""
        return self._local.index(self.rank)

    @property
    def local_size(self) -> int:
        """How many members share this member's host."""
        return len(self._local)

    @property
    def _local(self) -> tuple[int, ...]:
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on each host, in order; the hosts in the order of their first rank.

        Containers of one machine with networks of their own count as several hosts: they cannot
        share memory.
        """
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.machine, []).append(member.rank)
        return tuple(tuple(ranks) for ranks in found.values())

    def called(self, rank: int | None = None) -> str:
        """Name a member (this one without `rank`) as people know it: "rank 7 (member 2)".

        The second number, its rank here, stands where it is another than in the world that was
        joined.
        """
        number = self.rank if rank is None else rank
        return rank_text(self.members[number].world_rank, number)

    def subset(self, ranks: Sequence[int], name: str) -> World:
        """Make the world of some members; no communication, and nobody else takes part.

        All of these members call with the same ranks and name. The members are numbered by their
        positions in `ranks`; messages name them by their ranks in the world that was joined. Job,
        secret and generation are this world's; closing the subset closes nothing of this world,
        and when all have closed it, nothing of what they set is left.

        Args:
            ranks: The members, this one among them, by their ranks here.
            name: Names the subset; one name does for all parts of a split. New in this world
                for these members.

        Raises:
            UsageError: A rank is none of this world's, or comes twice, or this one's is absent.
        """
        self._check_subset(ranks, name)
        chosen = [self.members[rank] for rank in ranks]
        me = list(ranks).index(self.rank)
        known = tuple(member.world_rank for member in chosen)
        return replace(
            self,
            rank=me,
            size=len(chosen),
            members=tuple(
                member._replace(rank=position, origin=member.world_rank)
                for position, member in enumerate(chosen)
            ),
            why=f"{name}: ranks {list(known)} of {self.why}",
            store=SubsetStore(self.store, name, known, me),
            farewell=_nothing,
        )

    def scope(self, name: str) -> World:
        """Make the world of the same members with a part of the store to themselves.

        As a subset of all, but they keep their numbers. When all have closed it, nothing of what
        they set is left.
        """
        known = tuple(member.world_rank for member in self.members)
        store = SubsetStore(self.store, name, known, self.rank)
        return replace(self, store=store, farewell=_nothing)

    def _check_subset(self, ranks: Sequence[int], name: str) -> None:
        where = f"[cluster] rank {self.members[self.rank].world_rank}"
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
            raise UsageError(
                f"{where}: the group {name!r} of ranks {list(ranks)} is not valid: expected "
                f"different ranks from 0 to {self.size - 1}"
            )
        if self.rank not in ranks:
            raise UsageError(
                f"{where}: rank {self.rank} is not one of the ranks {list(ranks)} of the group "
                f"{name!r}; only its members make it"
            )

    def exchange(self, key: str, value: bytes, timeout: float) -> list[bytes]:
        """Give `value` and return every member's, by rank; a collective call.

        Args:
            key: Names the exchange; the same on all members, and new in this world.
            value: This member's contribution.
            timeout: Seconds in which all members must have called.

        Raises:
            TimeoutError: A member did not call in time; the message names its rank.
            PeerLostError: A member died.
        """
        wait = Wait(timeout)
        self.store.set(f"{key}/{self.rank}", value)
        if self.rank > 0:
            try:
                joined = self.store.get(f"{key}/all", wait.quiet)
                return [bytes.fromhex(text) for text in joined.decode().split(",")]
            except TimeoutError:  # somebody is late: who, shows one by one
                return self._collect(key, timeout, wait)
        values = self._collect(key, timeout, wait)
        # The others ask once, then, and not for each: 32 ranks on 2 cores spare 0.3 s of 1.9.
        self.store.set(f"{key}/all", ",".join(one.hex() for one in values).encode())
        return values

    def _collect(self, key: str, timeout: float, wait: Wait) -> list[bytes]:
        """Get every member's value, by rank."""
        values = []
        for rank in range(self.size):
            try:
                values.append(self._get(key, rank, wait))
            except TimeoutError as error:
                raise TimeoutError(
                    f"[cluster] rank {self.members[self.rank].world_rank}: rank "
                    f"{self.members[rank].world_rank} did not come within {timeout:g} s to where "
                    f"ranks make {_MADE}; {_REMEDY}"
                ) from error
        return values

    def _get(self, key: str, rank: int, wait: Wait) -> bytes:
        own = f"{key}/{rank}"
        try:
            return self.store.get(own, wait.quiet)
        except TimeoutError:
            who = f"rank {self.members[rank].world_rank}"
            if not wait.goes_on(f"{who} to make {_MADE}; {_REMEDY}"):
                raise
            return self.store.get(own, wait.remaining)

    def check_lives(self, seconds: float = _NEWS_SECONDS) -> None:
        """Raise PeerLostError if a member has died, or if news of that come within this time."""
        try:
            with contextlib.suppress(TimeoutError):  # the store tells those who wait
                self.store.get(f"{self.generation}/never", seconds)
        except PeerLostError as error:
            raise error from None  # whatever broke is its consequence

    def close(self) -> None:
        """Leave the world: its store is closed. Closing twice is harmless."""
        self.store.close()
        self.farewell()


class LeaderLeftError(PeerLostError):
    """The process that hosts the group leader has left in good order: nobody is known to be lost.

    Members tell each other nothing any more, but what needs no store may go on.
    """


def lost(rank: int, member: Member, reason: str) -> PeerLostError:
    """Build the error for a dead member, as seen by `rank`."""
    return PeerLostError(
        f"[cluster] rank {rank}: rank {member.rank} "
        f"(process {member.pid} on {member.host}) is gone: {reason}"
    )
