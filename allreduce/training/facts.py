"""What has to be the same on all ranks: compared by digests, told in words where it differs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from allreduce.comm import Communicator, exchange_plain
from allreduce.errors import AllreduceError, MismatchError
from allreduce.graph.agreement import differ, differ_between_steps
from allreduce.graph.fingerprint import sample
from allreduce.graph.replicator import Replicator
from allreduce.training.ranks import name_rank

SAME_SAMPLES = "load the same on every rank, in the same order"
SAME_ARRAYS = f'{SAME_SAMPLES}, or pass data="sharded" if each rank has rows of its own'
SAME_ROWS = "give rows of one dtype and shape on every rank"
SAME_OPTIONS = "pass the same options on every rank"
# Who compare: ranks between the steps of their replicas, or, where none have a part in it, as they
# are. None is a rank by itself.
Ranks = Replicator | Communicator | None
_ROWS = re.compile(r"(\w+ \()(\d+)(,.*\))")  # an array as it is shown: "float32 (20, 6)"
# Values of an array that are compared, or all there are. Reading so many of 205 MB takes
# 0.2 ms from memory and 0.04 ms from caches; a hash of all of them took 230 ms.
_SAMPLED = 4096
_REFUSAL = "a refusal"  # the fact, of ranks alone that come to no others, that they raise this


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that has to be the same on all ranks.

    Attributes:
        shown: Says it, or what can be said of it in a few words.
        remedy: What to do where it differs.
        digest: Of what `shown` does not say.
    """

    shown: str
    remedy: str
    digest: str = ""


def option(value: Any) -> Fact:
    """Make a fact of an option."""
    return Fact(repr(value), SAME_OPTIONS)


def array(value: np.ndarray | None, remedy: str, *, contents: bool = True) -> Fact:
    """Make a fact of an array, or of None.

    Args:
        value: The array.
        remedy: What to do where it differs.
        contents: Whether to compare the number of rows and a sample of the values too, or the dtype
            and the shape of a row alone.
    """
    if value is None:
        return Fact("None", remedy)
    shape = value.shape if contents else ("rows", *value.shape[1:])
    sizes = ", ".join(map(str, shape))
    shown = f"{value.dtype} ({sizes}{',' if len(shape) == 1 else ''})"
    return Fact(shown, remedy, digest(value) if contents else "")


def digest(value: np.ndarray) -> str:
    """Summarise a sample of an array's values, or all values of a small array.

    Shape and dtype are no part of it: `Fact.shown` says them.
    """
    return f"{crc32(sample(value, _SAMPLED).tobytes()):08x}"


def check_equal(ranks: Ranks, what: str, facts: Mapping[str, Fact]) -> None:
    """Compare what ranks have: one small exchange where they agree, a second where they do not.

    Args:
        ranks: Who compare.
        what: Who asks, and the same on every rank: "fit".
        facts: By name, what matters most first.

    Raises:
        MismatchError: They differ; the message says what, and on which ranks. Or a rank is
            `telling` that it cannot come here, makes another call, or is in a step of these
            replicas. On all ranks.
    """
    everyones, communicator = _compare(ranks, what, facts), _communicator(ranks)
    if communicator is None or not everyones:
        return
    rank = communicator.rank
    mine = everyones[rank]
    for other, each in enumerate(everyones):
        if _REFUSAL in each:
            raise MismatchError(f"{what} on rank {rank}: rank {other} raised {each[_REFUSAL][0]}")
    names = dict.fromkeys(name for each in (mine, *everyones) for name in each)
    for name in names:
        values = [each.get(name, ("missing", "")) for each in everyones]
        if len(set(values)) > 1:
            remedy = facts[name].remedy if name in facts else SAME_OPTIONS
            raise MismatchError(f"{what} on rank {rank}: {_disagreement(name, values, remedy)}")


@contextmanager
def telling(ranks: Ranks, what: str) -> Iterator[None]:
    """Check what one rank alone may have to refuse; all ranks call `check_equal` after the block.

    A rank whose block raises tells those who come to `check_equal`, which raises there, too: nobody
    is left in an exchange with a rank that has gone on to something else. Where one of them makes
    another call, or none, the rank still raises its own error, with a note that says what came.

    Args:
        ranks: As `check_equal` takes them.
        what: As `check_equal` is told.
    """
    try:
        yield
    except Exception as error:
        if _can_meet(ranks):
            text = f"{type(error).__name__}: {error}"
            try:
                _compare(ranks, what, {_REFUSAL: Fact(text, "")})
            except AllreduceError as failure:
                if text not in str(failure):  # else another has ended by the same error
                    error.add_note(f"the other ranks could not be told: {failure}")
        name_rank(error, _communicator(ranks), what)
        raise


def _communicator(ranks: Ranks) -> Communicator | None:
    """Return the communicator with one member per rank."""
    return ranks.communicator if isinstance(ranks, Replicator) else ranks


def _can_meet(ranks: Ranks) -> bool:
    communicator = _communicator(ranks)
    if communicator is None or communicator.closed or communicator.dead:
        return False
    return not (isinstance(ranks, Replicator) and ranks.is_over)


def _compare(
    ranks: Ranks, what: str, facts: Mapping[str, Fact]
) -> list[dict[str, tuple[str, str]]]:
    """Tell each other what ranks have, by rank; nothing where it is equal."""
    communicator = _communicator(ranks)
    if communicator is None or communicator.size == 1:
        return []
    mine = {name: [fact.shown, fact.digest] for name, fact in facts.items()}
    text, given = json.dumps(mine), f"what ranks gave to {what}"
    if isinstance(ranks, Replicator):
        differing = differ_between_steps(ranks, given, text)
    else:
        differing = differ(communicator, given, text)
    if not len(differing):
        return []
    told = exchange_plain(communicator, given, mine)
    return [{name: (*fact,) for name, fact in each.items()} for each in told]


def _groups(values: Sequence[Any]) -> dict[Any, list[int]]:
    """Give the ranks that have each value; what most have comes last."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: len(item[1])))


def _listed(groups: Mapping[str, Sequence[int]]) -> str:
    """Say which ranks have what: `9 on rank 1 but 8 on rank 0, 2`."""
    parts = [f"{value} on rank {_ranks(ranks)}" for value, ranks in groups.items()]
    return " but ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _disagreement(name: str, values: Sequence[tuple[str, str]], remedy: str) -> str:
    shown = _groups([text for text, _ in values])
    arrays = [_ROWS.fullmatch(text) for text, _ in values]
    rows = [f"{array[2]} rows" for array in arrays if array]
    kinds = {f"{array[1]}rows{array[3]}" for array in arrays if array}
    if len(shown) > 1 and len(rows) == len(values) and len(kinds) == 1:
        listed = _listed(_groups(rows))
        return f"{name}, {kinds.pop()}, is not as long on all ranks: {listed}; {remedy}"
    unlike = f"{name} is not the same on all ranks"
    if len(shown) > 1:
        return f"{unlike}: {_listed(shown)}; {remedy}"
    text = f" (all are {values[0][0]})" if values[0][0] else ""
    groups = [_ranks(ranks) for ranks in _groups(values).values()]
    if len(groups) == len(values):
        found = f"it is another one on every rank{text}; seed what makes it"
        return f"{unlike}: {found}, or {remedy}"
    if len(groups) == 2:
        found = f"that of rank {groups[0]} differs from that of rank {groups[1]}"
    else:
        found = (
            f"one on rank {', another on rank '.join(groups[:-1])} and another on rank {groups[-1]}"
        )
    return f"{unlike}: {found}{text}; {remedy}"
