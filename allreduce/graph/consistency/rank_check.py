"""Compare facts between ranks: by a digest, and, where they differ, by texts that name the first.

What has to be the same on all ranks is a dict of facts. Each kind is described by one function: a
step's operations (`outline`), an optimizer and its variables (`stamp`), assigned values and batches
(`fingerprint`), and the arguments of `fit` (`training/facts.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from allreduce.cluster.world import ranks_text
from allreduce.comm import Communicator, exchange, exchange_plain
from allreduce.errors import MismatchError, everywhere

_DIGEST_BYTES = 16


class Fact(NamedTuple):
    """Something that has to be the same on all ranks.

    Attributes:
        shown: The value, for people.
        remedy: What to do where it differs.
        compared: What is compared; None for `shown`, which may leave out what is compared, or say
            more.
        where: The user's line, or more that may differ.
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
    """Begin a digest with some facts; what changes from step to step can be added to copies."""
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
    """Compare facts of all ranks: one small exchange where they agree, and a second where not.

    Args:
        communicator: Whose members compare; all of them call it.
        rank: This process's.
        what: Names what is compared; the same on all members.
        facts: This rank's; a function is called only where ranks differ.
        digest: Of the facts, where the caller has it.
        gather: Exchanges the digests in place of `communicator`.

    Returns:
        The facts of each rank; empty where they are equal. The same on all members.
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
    """Give every member the facts of each rank."""
    told = exchange_plain(communicator, what, [rank, dict(facts)])
    return {each: {name: Fact(*fact) for name, fact in theirs.items()} for each, theirs in told}


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
    if everyones := compare(communicator, rank, what, facts, digest):
        raise mismatch(f"rank {rank}", everyones)


def mismatch(who: str, everyones: Mapping[int, Facts]) -> MismatchError:
    """Make the error that names the first difference; all ranks raise it."""
    return everywhere(MismatchError(f"{who}: {difference(everyones)}"))


def difference(everyones: Mapping[int, Facts]) -> str:
    """Say which fact is the first that differs, who has which value, and what to do."""
    for name in dict.fromkeys(name for facts in everyones.values() for name in facts):
        found = {rank: facts.get(name, _MISSING) for rank, facts in everyones.items()}
        groups: dict[str, list[int]] = {}
        for rank, fact in found.items():
            groups.setdefault(fact.key, []).append(rank)
        if len(groups) > 1:
            remedy = next(fact.remedy for fact in found.values() if fact is not _MISSING)
            return f"{_values(name, found, list(groups.values()))}; {remedy}"
    return _UNNAMED


def _values(name: str, found: Mapping[int, Fact], groups: Sequence[Sequence[int]]) -> str:
    """Say which ranks have which value of a fact."""
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
