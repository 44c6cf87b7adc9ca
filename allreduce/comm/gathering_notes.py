"""What members that meet for a group leave for each other in the store."""

from __future__ import annotations

import json
from typing import NamedTuple


class Wanted(NamedTuple):
    """A group that a member waits for."""

    kind: str  # "group", "local" or "across"
    number: int  # how often its members have made it, with this time
    ranks: tuple[int, ...]
    transport: str | None  # as the parent's without one
    site: str  # the caller's line
    turn: int  # counts what this member waits for, failures too
    attempt: int = 1  # how often its members have tried this, with this time

    @property
    def group(self) -> str:
        """What the keys of all attempts begin with."""
        return f"{self.kind}.{self.number}/{','.join(map(str, self.ranks))}"

    @property
    def key(self) -> str:
        """Under which its members arrive: by rank; "all" says that all have, or why not."""
        return f"{self.group}/{self.attempt}"

    def __str__(self) -> str:
        ranks = list(self.ranks)
        over = "" if self.transport is None else f", transport={self.transport!r}"
        group = self.kind == "group"
        call = f"group({ranks}{over})" if group else f"{self.kind}, of ranks {ranks},"
        return f"{call} at {self.site}"


class Failure(NamedTuple):
    """Why members have raised."""

    kind: str  # "mismatch", "timeout" or "lost"
    story: str
    turns: tuple[tuple[int, int], ...]  # of the members at fault: rank and turn
    keys: tuple[str, ...] = ()  # where these look, each in its own attempt


class Note(NamedTuple):
    """What a member has left under a key; empty if it waits for nobody."""

    wanted: Wanted | None = None  # what it has arrived for, or waits for
    failure: Failure | None = None
    gone: bool = False  # whether it has left, and comes to no group any more

    def pack(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def unpack(data: bytes) -> Note:
        wanted, failure, gone = json.loads(data)
        if wanted is not None:
            kind, number, ranks, *rest = wanted
            wanted = Wanted(kind, number, tuple(ranks), *rest)
        if failure is not None:
            kind, story, turns, keys = failure
            failure = Failure(kind, story, tuple(map(tuple, turns)), tuple(keys))
        return Note(wanted, failure, gone)
