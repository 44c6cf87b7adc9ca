"""How contestants are timed, and that wrong results are found."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from measure.cases import Array, Case
from measure.contest import FEWEST, Contestant, Timing, balanced_order, dump, hold, load, p99

CASE = Case("all_reduce", "float32", 1, 64)


def _contestant(name: str, spoil: float = 0) -> Contestant:
    x = np.empty(CASE.count, np.float32)

    def call() -> None:
        x[0] += spoil

    return Contestant(name, CASE, lambda source: np.copyto(x, source), int, call, lambda: x)


def test_the_slowest_rank_counts() -> None:
    def slowest(seconds: Array) -> Array:
        return np.maximum(seconds, 0.25)  # another rank's

    timings = hold([_contestant("a"), _contestant("b")], 0, 1e-9, slowest)
    assert [timing.contestant for timing in timings] == ["a", "b"]
    for timing in timings:
        assert (timing.median, timing.p99, timing.runs) == (0.25, 0.25, FEWEST)


def test_inputs_are_rewritten_and_wrong_results_found() -> None:
    with pytest.raises(AssertionError, match="liar") as raised:
        hold([_contestant("honest"), _contestant("liar", spoil=1)], 0, 1e-9, np.asarray)
    # One more than it should be, after many runs: each run began with fresh inputs.
    assert "Max absolute difference among violations: 1." in str(raised.value)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_everybody_follows_everybody_equally_often(count: int) -> None:
    rounds = [balanced_order(count, number) for number in range(2 * count)]
    assert all(sorted(each) == list(range(count)) for each in rounds)
    follows = Counter(pair for each in rounds for pair in pairwise(each))
    assert follows == dict.fromkeys(permutations(range(count), 2), 2)


def test_p99() -> None:
    assert p99([float(each) for each in range(1000)]) == 990
    assert p99([3.0, 1.0, 2.0]) == 3


def test_timings_travel(tmp_path: Path) -> None:
    timings = [Timing("all_reduce", "float32", 2, 64, "ordinary", 10, 1e-6, 2e-6)]
    dump(timings, "somebody's 1.0", tmp_path / "x.json")
    assert load(tmp_path / "x.json") == (timings, "somebody's 1.0")
