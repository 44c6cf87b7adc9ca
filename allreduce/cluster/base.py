"""What a world is: its members, and the store through which they meet."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from allreduce.cluster.waiting import Wait
from allreduce.errors import ClosedError, PeerLostError, TimeoutError


class Store(ABC):
    """Keys and bytes that all members of one world see; each member holds one object of it.

    Every blocking method raises `PeerLostError` when it waits for a member that died, and
    `ClosedError` after `close()`. Safe to use from several threads.
    """

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, for all members; replaces what was there."""

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of `key`, blocking until some member has set it.

        Raises:
            TimeoutError: Nobody set it within `timeout` seconds; the message names the key.
        """

    @abstractmethod
    def barrier(self, name: str, timeout: float) -> None:
        """Block until every member has entered the barrier `name`; a name can be used again.

        Raises:
            TimeoutError: Some members did not come in time; the message names their ranks.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. What this member had set stays for the others. Closing twice is harmless."""


class LocalStore(Store):
    """The store of a world of one: a dictionary, for this process's threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._check()
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        with self._changed:
            while key not in self._values:
                self._check()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(
                        f"[cluster] rank 0: nobody set {key!r} within {timeout:g} s, "
                        "and a world of one has nobody else who could"
                    )
                self._changed.wait(remaining)
            self._check()
            return self._values[key]

    def barrier(self, name: str, timeout: float) -> None:  # noqa: ARG002 - alone, nobody is missing
        with self._changed:
            self._check()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("[cluster] rank 0: the store is closed; call allreduce.init() again")


@dataclass(frozen=True)
class Member:
    """One process of a world."""

    rank: int
    host: str
    pid: int


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
    farewell: Callable[[], None] = field(default=_nothing, repr=False)  # runs after the close

    @property
    def local_rank(self) -> int:
        """This member's position among the members on its host.

        Hosts are told apart by the names that they give themselves: containers of one machine
        count as several, and machines of one name as one.
        """
        return [member.rank for member in self._local].index(self.rank)

    @property
    def local_size(self) -> int:
        """How many members share this member's host, which is told by its name."""
        return len(self._local)

    @property
    def _local(self) -> list[Member]:
        host = self.members[self.rank].host
        return [member for member in self.members if member.host == host]

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
        values = []
        for rank in range(self.size):
            try:
                values.append(self._get(key, rank, wait))
            except TimeoutError as error:
                raise TimeoutError(
                    f"[cluster] rank {self.rank}: rank {rank} brought nothing to {key!r} "
                    f"within {timeout:g} s"
                ) from error
        return values

    def _get(self, key: str, rank: int, wait: Wait) -> bytes:
        own = f"{key}/{rank}"
        try:
            return self.store.get(own, wait.quiet)
        except TimeoutError:
            if not wait.goes_on(f"rank {rank} in {key!r}; every rank has to make the same calls"):
                raise
            return self.store.get(own, wait.remaining)

    def close(self) -> None:
        """Leave the world: its store is closed. Closing twice is harmless."""
        self.store.close()
        self.farewell()


def lost(rank: int, member: Member, reason: str) -> PeerLostError:
    """Build the error for a dead member, as seen by `rank`."""
    return PeerLostError(
        f"[cluster] rank {rank}: rank {member.rank} "
        f"(process {member.pid} on {member.host}) is gone: {reason}"
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """Write "rank 3" or "ranks 1, 4, 5"."""
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
