"""Compare facts between ranks: first a digest; if it differs, the facts, to name the first.

Facts that must be equal on all ranks are kept in a dict. The program of a step is described by
`update/program_check.py`, an optimizer and its variables by `update/step_checksum.py`, batches
and assigned values by `trace/rank_digest.py`, and the arguments of `fit` by `training/facts.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from allreduce.cluster.store import ranks_text
from allreduce.comm import Communicator, exchange, exchange_plain
from allreduce.errors import MismatchError, everywhere

_DIGEST_BYTES = 16


class Fact(NamedTuple):
    """A value that must be the same on all ranks.

    Attributes:
        shown: The value as text, for error messages.
        remedy: The advice if it differs.
        compared: The text to compare, if it is not `shown`.
        where: The user's line or other context; not compared.
    """

    shown: str
    remedy: str
    compared: str | None = None
    where: str = ""

    @property
    def key(self) -> str:
        return self.shown if self.compared is None else self.compared


Facts = Mapping[str, Fact]  # by name; the first that differs is named
Gather = Callable[[str, np.ndarray], np.ndarray]  # a purpose and an array: those of all members

_MISSING = Fact("missing", "")
_UNNAMED = "ranks do not do the same; run the same program on every rank"


def hash_of(facts: Facts, size: int = _DIGEST_BYTES) -> hashlib.blake2b:
    """Start a digest with some facts; add values that change per step to copies of it."""
    text = json.dumps([(name, fact.key) for name, fact in facts.items()])
    return hashlib.blake2b(text.encode(), digest_size=size)


def compare(
    communicator: Communicator,
    rank: int,
    what: str,
    facts: Facts | Callable[[], Facts],
    digest: bytes | None = None,
    gather: Gather | None = None,
) -> dict[int, Facts]:
    """Compare the facts of all ranks: one small exchange, and a second one if they differ.

    Args:
        what: The name of the comparison, equal on all members.
        facts: This rank's facts, or a function that is called only if ranks differ.
        digest: The digest of the facts, if the caller has it.
        gather: Exchanges the digests instead of `communicator`.

    Returns:
        The facts of each rank; empty if they are equal. The same on all members.
    """
    if digest is None:
        assert not callable(facts)
        digest = hash_of(facts).digest()
    mine, purpose = np.frombuffer(digest, np.int64), f"a comparison of {what}"
    found = gather(purpose, mine) if gather else exchange(communicator, purpose, mine)
    if found.tobytes() == digest * len(found):
        return {}
    return gather_facts(communicator, rank, what, facts() if callable(facts) else facts)


def gather_facts(
    communicator: Communicator, rank: int, what: str, facts: Facts
) -> dict[int, Facts]:
    """Return the facts of each rank, on every member."""
    found = exchange_plain(communicator, what, [rank, dict(facts)])
    return {each: {name: Fact(*fact) for name, fact in theirs.items()} for each, theirs in found}


def check(
    communicator: Communicator,
    rank: int,
    what: str,
    facts: Facts | Callable[[], Facts],
    digest: bytes | None = None,
) -> None:
    """Compare facts as `compare` does.

    Raises:
        MismatchError: They differ; the message names the first difference. On all members.
    """
    if facts_by_rank := compare(communicator, rank, what, facts, digest):
        raise mismatch(f"rank {rank}", facts_by_rank)


def mismatch(who: str, facts_by_rank: Mapping[int, Facts]) -> MismatchError:
    """Return an error that names the first difference; all ranks raise it."""
    return everywhere(MismatchError(f"{who}: {difference(facts_by_rank)}"))


def difference(facts_by_rank: Mapping[int, Facts]) -> str:
    """Describe the first difference: the fact, its value on each rank, and the remedy."""
    for name in dict.fromkeys(name for facts in facts_by_rank.values() for name in facts):
        found = {rank: facts.get(name, _MISSING) for rank, facts in facts_by_rank.items()}
        groups: dict[str, list[int]] = {}
        for rank, fact in found.items():
            groups.setdefault(fact.key, []).append(rank)
        if len(groups) > 1:
            remedy = next(fact.remedy for fact in found.values() if fact is not _MISSING)
            return f"{_values(name, found, list(groups.values()))}; {remedy}"
    return _UNNAMED


def _values(name: str, found: Mapping[int, Fact], groups: Sequence[Sequence[int]]) -> str:
    """Describe the values of a fact and the ranks that have them."""
    firsts = [found[ranks[0]] for ranks in groups]
    shown = [fact.shown for fact in firsts]
    verb = "is"
    if len(set(shown)) == 1:  # the values are too large to be shown
        name = f"{name}, {shown[0]}," if shown[0] else name
        verb, shown = "has", ["one value", *["another"] * (len(groups) - 1)]
    parts = [
        f"{text}{fact.where and f' ({fact.where})'} on {ranks_text(ranks)}"
        for text, fact, ranks in zip(shown, firsts, groups, strict=True)
    ]
    return f"{name} {verb} {', '.join(parts[:-1])} but {parts[-1]}"
