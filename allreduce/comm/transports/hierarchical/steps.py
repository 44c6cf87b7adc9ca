"""The steps of hierarchical chains, and the chunks of large calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from allreduce.comm.calls.call import REDUCING, Call, item_bytes, starts
from allreduce.comm.transports.hierarchical.layout import Layout

# Bytes of a chunk, whose steps overlap with those of other chunks: several tcp chunks per lane. Not
# measured: on one machine the levels share its cores and memory.
CHUNK = 2 << 20
# Bytes of working memory of one member's chains in flight: about three chunks.
MEMORY = 12 << 20
# Calls up to this size in bytes use one lane: they fit in the post of a tcp member.
ONE_LANE = 4096
_WIDE = ("float16", "bfloat16")
_ROUNDS = ("sum", "mean", "prod")


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of an array: the call's `x` or `out`, or working memory."""

    array: str  # "x", "out", or the name of working memory
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Step:
    """A call of a level.

    Args:
        level: "in" and "out" are the host's, before and after "across", the member's lane; "every"
            has all members.
        call: The call, with member indices of the level.
    """

    level: str
    call: Call
    source: Part | None
    target: Part | None


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies within this member, possibly with conversion."""

    pairs: tuple[tuple[Part, Part], ...]  # from, to

    @property
    def target(self) -> Part:
        return self.pairs[0][1]


@dataclass(frozen=True, slots=True)
class Division:
    """Divides a sum in place, for a mean."""

    target: Part
    by: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps that run one after the other; chains of one call are independent."""

    steps: tuple[Step | Copies | Division, ...]
    dtype: str  # of the working memory
    memory: dict[str, int]  # elements of each piece of it

    @property
    def nbytes(self) -> int:
        """How much working memory it takes."""
        return sum(self.memory.values()) * item_bytes(self.dtype)

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of its steps."""
        return tuple(step.level for step in self.steps if isinstance(step, Step))


class Builder:
    """Collects one member's chain: its part of the steps of all members."""

    def __init__(self, call: Call, layout: Layout, me: int) -> None:
        self.call, self.layout, self.me = call, layout, me
        self.host, self.position = layout.places[me]
        self.mates = layout.hosts[self.host]
        self.dtype = call.dtype
        if call.dtype in _WIDE and call.op in _ROUNDS:
            self.dtype = "float32"  # nothing is rounded between the levels
        self.op = "sum" if call.op == "mean" else call.op
        self._steps: list[Step | Copies | Division] = []
        self._memory: dict[str, int] = {}

    @property
    def wide(self) -> bool:
        """Whether working memory has a wider type than the caller's arrays."""
        return self.dtype != self.call.dtype

    def allocate(self, count: int) -> Part:
        """Reserve working memory."""
        name = f"work{len(self._memory)}"
        self._memory[name] = count
        return Part(name, 0, count)

    def copy(self, *pairs: tuple[Part, Part]) -> None:
        """Copy parts that have elements."""
        kept = tuple(pair for pair in pairs if pair[0].count)
        if kept:
            self._steps.append(Copies(kept))

    def divide(self, part: Part) -> None:
        """Turn a sum over all members into the mean if the call asks for it."""
        if self.call.op == "mean" and part.count:
            self._steps.append(Division(part, self.layout.size))

    def step(
        self,
        level: str,
        collective: str,
        count: int,
        source: Part | None,
        target: Part | None,
        *,
        root: int | None = None,
        counts: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
    ) -> None:
        """Call a collective of a level."""
        call = Call(
            collective,
            self.op if collective in REDUCING else None,
            self.dtype,
            count,
            root,
            self.call.group,
            None if counts is None else tuple(counts),
            None if receives is None else tuple(receives),
        )
        self._steps.append(Step(level, call, source, target))

    def chain(self) -> Chain:
        return Chain(tuple(self._steps), self.dtype, dict(self._memory))


def cut(count: int, pieces: int) -> list[tuple[int, int]]:
    """Cut `count` elements into pieces that differ by one at most: (start, stop) of each."""
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    return list(pairwise(bounds))


def chunks(count: int, dtype: str) -> int:
    """Return how many pieces a call of so many elements is cut into."""
    return max(1, -(-count * item_bytes(dtype) // CHUNK))


def shifted(part: Part, counts: Sequence[int]) -> list[Part]:
    """Cut a part into consecutive ones of these lengths."""
    return [
        replace(part, start=part.start + start, stop=part.start + start + count)
        for start, count in zip(starts(counts), counts, strict=True)
    ]
