"""Where buckets are cut, from measured times: proved on numbers alone."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allreduce.reduction import Costs, Gradients, choose_cuts, cutting, modelled_end
from allreduce.reduction.cutting import _places

STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6)
COSTS = st.builds(
    Costs,
    latency=st.sampled_from([0.0, 0.5, 3.0]),
    per_byte=st.sampled_from([0.0, 0.5, 2.0]),
    beside=st.sampled_from([0.0, 0.25, 1.0]),
    update_per_byte=st.sampled_from([0.0, 0.25]),
)


def _step(rows: list[tuple[int, int]]) -> Gradients:
    ready = np.cumsum([after for after, _ in rows]).astype(float)
    return Gradients(tuple(size for _, size in rows), tuple(ready), float(ready[-1]) + 1.0)


@settings(max_examples=40, deadline=None)
@given(STEPS, COSTS, st.sampled_from([1, 5, 12, 15]))
def test_no_other_cuts_end_earlier_and_none_is_needless(
    rows: list[tuple[int, int]], costs: Costs, limit: int
) -> None:
    step = _step(rows)
    count = len(rows)
    tried = [cuts for n in range(count) for cuts in combinations(range(1, count), n)]

    def fits(cuts: tuple[int, ...]) -> bool:
        parts = zip((0, *cuts), (*cuts, count), strict=True)
        return all(
            last == first + 1 or sum(step.nbytes[first:last]) <= limit for first, last in parts
        )

    allowed = [cuts for cuts in tried if fits(cuts)]
    chosen = choose_cuts(step, costs, limit)
    assert chosen in allowed
    end = modelled_end(step, costs, chosen)
    assert end == pytest.approx(min(modelled_end(step, costs, cuts) for cuts in allowed))
    fewer = [tuple(each for each in chosen if each != cut) for cut in chosen]
    assert all(modelled_end(step, costs, cuts) > end for cuts in fewer if cuts in allowed)


def test_what_is_hidden_needs_to_start_early() -> None:
    step = Gradients((10, 10, 10), (1.0, 2.0, 3.0), 3.0)
    whole = Costs(latency=0.1, per_byte=0.1, beside=1.0, update_per_byte=0.0)
    assert choose_cuts(step, whole, 100) == (1, 2)
    assert modelled_end(step, whole, (1, 2)) == pytest.approx(1.0 + 3 * 1.1)
    assert modelled_end(step, whole, ()) == pytest.approx(3.0 + 0.1 + 3.0)


def test_where_nothing_goes_on_beside_the_computation_cuts_only_cost() -> None:
    step = Gradients((10, 10, 10), (1.0, 2.0, 3.0), 3.0)
    costs = Costs(latency=0.1, per_byte=0.1, beside=0.0, update_per_byte=0.0)
    assert choose_cuts(step, costs, 100) == ()
    assert choose_cuts(step, costs, 20) in ((1,), (2,))
    assert modelled_end(step, costs, (1, 2)) == pytest.approx(3.0 + 3 * 1.1)


def test_half_of_a_collective_beside_the_computation() -> None:
    step = Gradients((10,), (1.0,), 3.0)
    costs = Costs(latency=0.0, per_byte=0.3, beside=0.5, update_per_byte=0.2)
    # Of 3 seconds one is done until 3.0, two then; the update takes two more.
    assert modelled_end(step, costs, ()) == pytest.approx(7.0)


@pytest.mark.parametrize("size", [10, 300 << 10, 3 << 20])
def test_there_are_few_places_to_search_whatever_the_sizes(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[int]] = []

    def places(step: Gradients, grain: int) -> list[int]:
        found.append(_places(step, grain))
        return found[-1]

    monkeypatch.setattr(cutting, "_places", places)
    count = 3000
    step = Gradients((size,) * count, (0.0,) * count, 0.0)
    choose_cuts(step, Costs(1e-5, 1e-9, 0.0, 0.0), 4 << 20)
    assert len(found[0]) <= 2 * 256 + 2


def test_thousands_of_small_variables_are_cut_in_a_moment() -> None:
    count = 4000
    step = Gradients((1000,) * count, tuple(np.arange(count) * 1e-6), count * 1e-6)
    costs = Costs(latency=1e-5, per_byte=1e-9, beside=1.0, update_per_byte=1e-10)
    cuts = choose_cuts(step, costs, 1 << 20)
    assert list(cuts) == sorted(set(cuts))
    assert modelled_end(step, costs, cuts) < modelled_end(
        step, costs, tuple(range(1000, count, 1000))
    )
