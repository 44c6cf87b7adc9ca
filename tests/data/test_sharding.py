"""Plans cut every row exactly once, contiguously, bigger parts first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce.data import Piece, Replicated, Sharded, split_rows
from allreduce.errors import UsageError


@given(st.integers(0, 1000), st.integers(1, 17))
def test_split_rows_is_even_and_ordered(rows: int, parts: int) -> None:
    sizes = split_rows(rows, parts)
    assert len(sizes) == parts
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(0, 300), st.integers(1, 70), st.integers(1, 9))
def test_a_replicated_plan_takes_every_row_once_and_in_order(
    rows: int, batch_size: int, replicas: int
) -> None:
    plan = Replicated(rows, batch_size, replicas)
    taken: list[int] = []
    for step in range(plan.steps):
        pieces = plan.pieces(step)
        assert len(pieces) == replicas
        for piece in pieces:
            assert piece.source == step * batch_size + piece.offset
            taken += range(piece.source, piece.source + piece.rows)
    assert taken == list(range(rows))


def test_the_last_batch_leaves_late_replicas_without_rows() -> None:
    plan = Replicated(rows=10, batch_size=8, replicas=3)
    assert plan.pieces(0) == (Piece(0, 3, 0), Piece(3, 3, 3), Piece(6, 2, 6))
    assert plan.pieces(1) == (Piece(8, 1, 0), Piece(9, 1, 1), Piece(10, 0, 2))


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3)), min_size=1, max_size=5),
    st.integers(0, 20),
)
def test_a_sharded_plan_takes_each_ranks_rows_once_and_numbers_the_batch(
    ranks: list[tuple[int, int]], extra: int
) -> None:
    rows, replicas = (tuple(column) for column in zip(*ranks, strict=True))
    plan = Sharded(rows, sum(replicas) + extra, replicas)
    taken: list[list[int]] = [[] for _ in ranks]
    for step in range(plan.steps):
        pieces = iter(plan.pieces(step))
        place = 0
        for rank, count in enumerate(replicas):
            for _ in range(count):
                piece = next(pieces)
                assert piece.offset == place
                place += piece.rows
                taken[rank] += range(piece.source, piece.source + piece.rows)
        assert 0 < place <= plan.batch_size
    assert taken == [list(range(count)) for count in rows]


def test_a_sharded_batch_smaller_than_the_replicas_would_lose_rows() -> None:
    with pytest.raises(UsageError, match="choose batch_size >= 4"):
        Sharded((5, 5, 5, 5), 3, (1, 1, 1, 1))


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, "8"])
def test_batch_size_is_a_positive_integer(batch_size: object) -> None:
    with pytest.raises(UsageError, match="batch_size is the global batch"):
        Replicated(10, batch_size, 2)  # type: ignore[arg-type]
