"""What members that meet for a group leave for each other in the store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Wanted:
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


@dataclass(frozen=True)
class Failure:
    """Why members have raised."""

    kind: str  # "mismatch", "timeout" or "lost"
    story: str
    turns: tuple[tuple[int, int], ...]  # of the members at fault: rank and turn
    keys: tuple[str, ...] = ()  # where these look, each in its own attempt


@dataclass(frozen=True)
class Note:
    """What a member has left under a key; empty if it waits for nobody."""

    wanted: Wanted | None = None  # what it has arrived for, or waits for
    failure: Failure | None = None
    gone: bool = False  # whether it has left, and comes to no group any more

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def unpack(data: bytes) -> Note:
        read = json.loads(data)
        wanted, failure = read["wanted"], read["failure"]
        if wanted is not None:
            wanted = Wanted(**wanted | {"ranks": tuple(wanted["ranks"])})
        if failure is not None:
            turns = tuple((rank, turn) for rank, turn in failure["turns"])
            failure = Failure(**failure | {"turns": turns, "keys": tuple(failure["keys"])})
        return Note(wanted, failure, read["gone"])
