"""A world: its members, and the store through which they meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from allreduce.cluster.host.address import LOOPBACK
from allreduce.cluster.host.machine import process_state
from allreduce.cluster.host.waiting import Wait
from allreduce.cluster.store import Store, SubsetStore, rank_text
from allreduce.errors import PeerLostError, TimeoutError, UsageError

_MADE = "a communicator together"  # the purpose of exchanges, for messages
_REMEDY = "every rank has to make the same calls"
_NEWS_SECONDS = 0.5  # for the store to report the death behind a broken connection


class Member(NamedTuple):
    """One process of a world."""

    rank: int
    host: str  # its name, for messages
    pid: int
    machine: str = ""  # equal on one host (cluster/host/machine.py)
    origin: int | None = None  # in a subset: its rank in the world that was joined

    @property
    def world_rank(self) -> int:
        """Its rank in the world that was joined, used in messages."""
        return self.rank if self.origin is None else self.origin


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class World:
    """The members of a job. Immutable: another membership is a World of a later generation."""

    generation: int
    rank: int
    size: int
    members: tuple[Member, ...]
    source: str  # its resolver: "single", "mpi", "leader" or "slurm"
    why: str  # the log line: the source that won, why, and the ignored ones
    job: str  # the job's unique hexadecimal id, equal on all ranks
    secret: bytes = field(repr=False)  # the job's secret, equal on all ranks
    store: Store = field(repr=False)
    # This machine's address on the way to the leader; others may reach this process there.
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
        """Name a member (default: this one) for messages: "rank 7 (member 2)".

        The second number is its rank here, shown if it differs from its rank in the joined world.
        """
        number = self.rank if rank is None else rank
        return rank_text(self.members[number].world_rank, number)

    def state(self, rank: int) -> str:
        """Describe a member's process; only of this host it is known whether it lives."""
        member = self.members[rank]
        if member.machine == self.members[self.rank].machine:
            return process_state(member.pid)
        return f"process {member.pid} on {member.host}"

    def subset(self, ranks: Sequence[int], name: str) -> World:
        """Make the world of some members, without communication; only these members call it.

        They all pass the same ranks and name. A member's new rank is its position in `ranks`;
        messages name the ranks of the joined world. Job, secret and generation are this world's.
        Closing the subset does not close this world, and once all members have closed it, its
        keys are deleted.

        Args:
            ranks: The members, including this one, by their ranks here.
            name: The subset's name, new in this world for these members; all parts of a split
                can share one.

        Raises:
            UsageError: A rank is not in this world, or repeated, or this one is missing.
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
        """All-gather one value per member through the store; a collective call.

        Args:
            key: The name of the exchange: the same on all members, and new in this world.
            value: This member's contribution.
            timeout: Seconds within which all members must call.

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
            except TimeoutError:  # some member is late: find it one by one
                return self._collect(key, timeout, wait)
        values = self._collect(key, timeout, wait)
        # So the others ask once, not once per member: 1.6 s instead of 1.9 s (32 ranks, 2 cores).
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
            if not wait.has_time_left(f"{who} to make {_MADE}; {_REMEDY}"):
                raise
            return self.store.get(own, wait.remaining)

    def check_lives(self, seconds: float = _NEWS_SECONDS) -> None:
        """Raise PeerLostError if a member has died, or if that is reported within `seconds`."""
        try:
            with contextlib.suppress(TimeoutError):  # a waiting get raises the loss
                self.store.get(f"{self.generation}/never", seconds)
        except PeerLostError as error:
            raise error from None  # the error in progress follows from it

    def close(self) -> None:
        """Leave the world: its store is closed. Closing twice is harmless."""
        self.store.close()
        self.farewell()


class LeaderLeftError(PeerLostError):
    """The group leader's host has left in good order; no member is known to be lost.

    The store is gone, but whatever does not need it can continue.
    """


def lost(rank: int, member: Member, reason: str) -> PeerLostError:
    """Build the error for a dead member, as seen by `rank`."""
    return PeerLostError(
        f"[cluster] rank {rank}: rank {member.rank} "
        f"(process {member.pid} on {member.host}) is gone: {reason}"
    )
