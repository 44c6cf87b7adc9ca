"""The store through which members meet: its interface, a local one, and a subset's part."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from allreduce.errors import ClosedError, TimeoutError

# Keys that a rank sets: it is ending (the value is its error, if any), or saving because another
# rank is lost; and: it ends because another rank is lost.
ENDING = "ending"
VICTIM = "victim"


class SilentError(ConnectionError):
    """The store's host has not answered in time; it may be busy, or stopped."""


class Store(ABC):
    """Keys and bytes that all members of one world see; each member holds one object of it.

    Every blocking method raises `PeerLostError` when it waits for a member that died, and
    `ClosedError` after `close()`. Safe to use from several threads.
    """

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key` for all members, replacing any previous value."""

    @abstractmethod
    def post(self, key: str, value: bytes) -> None:
        """As `set`, but without waiting for the answer; never fails.

        The value may be lost, for example if it is too long for the store.
        """

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of `key`, blocking until some member has set it.

        Raises:
            TimeoutError: No member set it within `timeout` seconds; the message names the key.
        """

    @abstractmethod
    def try_get(self, key: str, patience: float, timeout: float = 0.0) -> bytes | None:
        """Return the value of `key`, or None if it is not set.

        Args:
            patience: Seconds to wait for the store's answer, beyond `timeout`.
            timeout: Seconds to wait for a member to set the key.

        Raises:
            SilentError: The store does not answer in time.
        """

    @abstractmethod
    def delete_prefix(self, prefix: str, ranks: Sequence[int]) -> None:
        """Declare that this member uses no key with this prefix any more; does not wait.

        The keys are deleted once all of `ranks` have called this, or are gone. Does nothing if the
        store has ended.

        Args:
            ranks: The members that use them, by rank in the joined world; the same on all members.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. Values that this member set stay for the others. Closing twice is harmless."""


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

    def post(self, key: str, value: bytes) -> None:
        with contextlib.suppress(ClosedError):
            self.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        with self._changed:
            while key not in self._values:
                self._check()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(
                        f"[cluster] rank 0: no member set {key!r} within {timeout:g} s, "
                        "and a world of one has no other member"
                    )
                self._changed.wait(remaining)
            self._check()
            return self._values[key]

    def try_get(self, key: str, patience: float, timeout: float = 0.0) -> bytes | None:  # noqa: ARG002
        try:
            return self.get(key, timeout)
        except TimeoutError:
            return None

    def delete_prefix(self, prefix: str, ranks: Sequence[int]) -> None:  # noqa: ARG002 - it is alone
        with self._changed:
            remove(self._values, prefix)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("[cluster] rank 0: the store is closed; call allreduce.init() again")


class SubsetStore(Store):
    """A subset's part of its parent's store.

    Its keys are the parent's keys under a separate prefix. As in the parent, a wait for a key
    fails once any member of the parent has died. Closing it does not close the parent; once all
    members have closed it, its keys are deleted.

    Args:
        name: The subset's name; new in the parent.
        ranks: The members, by rank in the joined world.
        me: This member's position in `ranks`.
    """

    def __init__(self, parent: Store, name: str, ranks: tuple[int, ...], me: int) -> None:
        self._parent, self._ranks, self._me = parent, ranks, me
        # Two subsets of one name, as the halves of a split, differ in their members.
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        self._prefix = f"{name}@{members}/"
        self._lock = threading.Lock()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        self._check()
        self._parent.set(self._prefix + key, value)

    def post(self, key: str, value: bytes) -> None:
        if not self._closed:
            self._parent.post(self._prefix + key, value)

    def get(self, key: str, timeout: float) -> bytes:
        self._check()
        try:
            return self._parent.get(self._prefix + key, timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"[cluster] rank {self._ranks[self._me]}: no member set {key!r} within "
                f"{timeout:g} s"
            ) from error

    def try_get(self, key: str, patience: float, timeout: float = 0.0) -> bytes | None:
        self._check()
        return self._parent.try_get(self._prefix + key, patience, timeout)

    def delete_prefix(self, prefix: str, ranks: Sequence[int]) -> None:
        if not self._closed:
            self._parent.delete_prefix(self._prefix + prefix, ranks)

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._parent.delete_prefix(self._prefix, self._ranks)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(
                f"[cluster] rank {self._ranks[self._me]}: the store of this group is closed"
            )


def remove(values: dict[str, bytes], prefix: str) -> None:
    """Delete the keys with this prefix."""
    for key in [key for key in values if key.startswith(prefix)]:
        del values[key]


def rank_text(rank: int, member: int) -> str:
    """Write "rank 7", or "rank 7 (member 2)" if its number in the group differs."""
    return f"rank {rank}" if rank == member else f"rank {rank} (member {member})"


def ranks_text(ranks: Iterable[int]) -> str:
    """Write "rank 3" or "ranks 1, 4, 5"."""
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
