"""Compare facts that must be equal on all ranks, by digests, and describe differences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np

from allreduce.comm import Communicator
from allreduce.errors import AllreduceError, MismatchError, everywhere
from allreduce.graph.consistency import rank_check
from allreduce.graph.consistency.rank_check import Fact, Facts
from allreduce.graph.core.spec import show
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.rank_digest import sample
from allreduce.training.ranks import name_rank

SAME_SAMPLES = "load the same on every rank, in the same order"
SAME_ARRAYS = f'{SAME_SAMPLES}, or pass data="sharded" if each rank has rows of its own'
SAME_ROWS = "give rows of one dtype and shape on every rank"
SAME_OPTIONS = "pass the same options on every rank"
# The ranks that compare: between the steps of their replicas, or without replicas. None is a single
# rank.
Ranks = Replicator | Communicator | None
# Values of an array that are compared, or all there are. Reading so many of 205 MB takes
# 0.2 ms from memory and 0.04 ms from caches; a hash of all of them took 230 ms.
_SAMPLED = 4096
_REFUSAL = "a refusal"  # the fact, of ranks alone that come to no others, that they raise this


def option(value: Any) -> Fact:
    """Make a fact of an option."""
    return Fact(repr(value), SAME_OPTIONS)


def array(value: np.ndarray | None, remedy: str, *, contents: bool = True) -> Fact:
    """Make a fact of an array, or of None.

    Args:
        remedy: The remedy if it differs.
        contents: Whether to compare the number of rows and a sample of the values, or only the
            dtype and the shape of a row.
    """
    if value is None:
        return Fact("None", remedy)
    if not contents:
        return Fact(f"{value.dtype} {show(('rows', *value.shape[1:]))}", remedy)
    shown = f"{value.dtype} {show(value.shape)}"
    return Fact(shown, remedy, f"{shown} {digest(value)}")


def digest(value: np.ndarray) -> str:
    """Summarise a sample of an array's values, or all values of a small array.

    Shape and dtype are no part of it: `Fact.shown` says them.
    """
    return f"{crc32(sample(value, _SAMPLED).tobytes()):08x}"


def check_equal(ranks: Ranks, what: str, facts: Facts) -> None:
    """Compare the facts of all ranks: one small exchange if they agree, a second if they differ.

    Args:
        what: The caller, equal on every rank: "fit".
        facts: By name, the most important first.

    Raises:
        MismatchError: They differ; the message says what, and on which ranks. Or a rank has
            raised instead of coming here, makes another call, or is in a step of these replicas. On
            all ranks.
    """
    communicator, other_facts = _communicator(ranks), _compare(ranks, what, facts)
    if communicator is None or not other_facts:
        return
    who = f"{what} on rank {communicator.rank}"
    for other, each in other_facts.items():
        if _REFUSAL in each:
            raise everywhere(MismatchError(f"{who}: rank {other} raised {each[_REFUSAL].shown}"))
    raise rank_check.mismatch(who, other_facts)


@contextmanager
def raising_on_all_ranks(ranks: Ranks, what: str) -> Iterator[None]:
    """Run checks that may fail on one rank only; all ranks call `check_equal` after the block.

    A rank whose block raises informs the ranks in `check_equal`, which then raises there, too, so
    that no rank waits in an exchange that will not happen. If another rank makes a different call,
    or none, this rank still raises its own error, with a note about the other call.

    Args:
        ranks: As `check_equal` takes them.
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


def _compare(ranks: Ranks, what: str, facts: Facts) -> dict[int, Facts]:
    """Compare facts; return the facts of each rank, or None if they are equal."""
    communicator = _communicator(ranks)
    if communicator is None or communicator.size == 1:
        return {}
    gather = ranks.exchange if isinstance(ranks, Replicator) else None
    given = f"what ranks gave to {what}"
    return rank_check.compare(communicator, communicator.rank, given, facts, gather=gather)
