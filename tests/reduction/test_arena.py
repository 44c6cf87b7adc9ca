"""Arenas and buckets: where things lie, proved on plans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce.reduction import Arena, Layout, lay_out, plan_buckets

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=12)


def _layout(shapes: list[tuple[int, ...]], dtype: str = "float32") -> Layout:
    return lay_out([(f"p{i}", shape) for i, shape in enumerate(shapes)], dtype)


@given(SHAPES, st.sampled_from(["float32", "float64"]))
def test_spans_are_aligned_disjoint_and_behind_the_header(
    shapes: list[tuple[int, ...]], dtype: str
) -> None:
    layout = _layout(shapes, dtype)
    end = layout.header
    for span, shape in zip(layout.spans, shapes, strict=True):
        assert span.start * layout.dtype.itemsize % 64 == 0
        assert span.start >= end
        assert span.size == np.prod(shape, dtype=int)
        end = span.start + span.size
    assert layout.size >= end


@given(SHAPES, st.integers(1, 4000))
def test_buckets_cover_everything_once_and_in_order(
    shapes: list[tuple[int, ...]], limit: int
) -> None:
    layout = _layout(shapes)
    buckets = plan_buckets(layout, limit)
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert buckets[0].start == 0  # with the count
    assert buckets[-1].stop == layout.size
    for before, after in itertools.pairwise(buckets):
        assert before.stop == after.start == after.parameters_start
        assert before.last == after.first
    for bucket in buckets:
        size = (bucket.stop - bucket.parameters_start) * layout.dtype.itemsize
        assert size <= limit or bucket.last - bucket.first == 1


def test_a_bucket_is_not_larger_than_its_limit_where_two_would_fit() -> None:
    layout = _layout([(16,), (16,), (16,)])
    spans = [(b.first, b.last) for b in plan_buckets(layout, 128)]
    assert spans == [(0, 2), (2, 3)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_views_share_the_arenas_memory(dtype: str) -> None:
    layout = _layout([(3, 5), (), (7,)], dtype)

    def allocate(size: int, kind: np.dtype) -> np.ndarray:
        return np.zeros(size, kind)

    arena = Arena(layout, ("m",), allocate, allocate)
    for index, shape in enumerate([(3, 5), (), (7,)]):
        view = arena.view(arena.parameters, index)
        assert view.shape == shape
        view[...] = index + 1
    arena.count[0] = 9
    assert arena.gradients[0] == 9
    assert arena.parameters.sum() == 15 * 1 + 1 * 2 + 7 * 3
    assert not arena.slots["m"].any()
