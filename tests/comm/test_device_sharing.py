"""Dealing out the GPUs of a host to its ranks."""

from __future__ import annotations

import pytest

from allreduce.comm.device_sharing import plan
from allreduce.errors import UsageError


def _same(ranks: int, gpus: int) -> dict[int, tuple[str, ...]]:
    return dict.fromkeys(range(ranks), tuple("abcdefgh"[:gpus]))


@pytest.mark.parametrize(
    ("ranks", "gpus", "shares"),
    [
        (2, 2, ["a", "b"]),
        (8, 8, [*"abcdefgh"]),
        (2, 8, ["abcd", "efgh"]),
        (3, 8, ["abc", "def", "gh"]),
        (1, 4, ["abcd"]),
    ],
)
def test_equal_sets_are_dealt_out_evenly(ranks: int, gpus: int, shares: list[str]) -> None:
    found = plan(_same(ranks, gpus), shared=False)
    assert ["".join(found[rank]) for rank in range(ranks)] == shares


def test_sets_of_their_own_are_taken_as_they_are() -> None:
    seen = {0: ("a", "b"), 1: ("d", "c"), 2: ()}
    assert plan(seen, shared=False) == seen
    two_and_two = {0: ("a", "b"), 1: ("a", "b"), 2: ("c",), 3: ()}
    assert plan(two_and_two, shared=False) == {0: ("a",), 1: ("b",), 2: ("c",), 3: ()}


def test_sets_that_overlap_in_part_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"rank 0 sees 2 GPUs and rank 1 2, of which 1 .*\(b\)"):
        plan({0: ("a", "b"), 1: ("b", "c")}, shared=False)


def test_more_ranks_than_gpus_need_leave() -> None:
    with pytest.raises(UsageError, match=r"ranks 0, 1, 2 .* see 2 GPUs.*ALLREDUCE_SHARE_GPUS=on"):
        plan(_same(3, 2), shared=False)
    assert plan(_same(3, 2), shared=True) == {0: ("a",), 1: ("b",), 2: ("a",)}
