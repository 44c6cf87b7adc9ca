"""Batches for this process's replicas: the right rows, weights and offsets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from allreduce.data import (
    ArrayBatches,
    DistributedDataset,
    Replicated,
    distribute,
    shuffled,
)
from allreduce.data import batches as batches_module
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.trace import HOST


def replicator(local: int = 1, first: int = 0, total: int = 1) -> Replicator:
    return Replicator([HOST] * local, first, total)


@pytest.mark.parametrize("threaded", [False, True])
def test_replicas_of_all_ranks_together_see_every_row_once(
    threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "_WORTH_A_THREAD", 0 if threaded else 10**12)
    x = np.arange(22 * 3, dtype=np.float32).reshape(22, 3)
    y = np.arange(22)
    order = shuffled(22, [7, 0])
    plan = Replicated(22, 8, 4)
    ranks = [replicator(local=2, first=first, total=4) for first in (0, 2)]
    per_rank = [list(ArrayBatches((x, y), plan, rank, order)) for rank in ranks]
    assert [len(steps) for steps in per_rank] == [3, 3]
    for step in range(3):
        rows = order[step * 8 : step * 8 + 8]
        for array, index in ((x, 0), (y, 1)):
            parts = [value for steps in per_rank for value in steps[step][index].values]
            assert np.array_equal(np.concatenate(parts), array[rows])
        weights = [w for steps in per_rank for w in steps[step][0].weights]
        offsets = [o for steps in per_rank for o in steps[step][0].offsets]
        assert weights == [len(part) for part in parts]
        assert offsets == list(np.cumsum([0, *weights[:-1]]))


def test_the_order_depends_on_the_key_alone() -> None:
    assert np.array_equal(shuffled(50, [3, 1]), shuffled(50, [3, 1]))
    assert sorted(shuffled(50, [3, 1])) == list(range(50))
    assert not np.array_equal(shuffled(50, [3, 1]), shuffled(50, [3, 2]))
    assert not np.array_equal(shuffled(50, [3, 1]), shuffled(50, [4, 1]))


def test_a_dataset_of_dicts_is_cut_and_iterates_again() -> None:
    batches = [{"image": np.ones((5, 2)), "label": np.arange(5)}, {"image": np.ones((1, 2))}]
    dataset = DistributedDataset(batches, replicator(local=1, first=1, total=2))
    assert len(dataset) == 2
    for _ in range(2):
        first, second = list(dataset)
        assert first["label"].values[0].tolist() == [3, 4]
        assert first["label"].offsets == (3,)
        assert first["image"].weights == (2,)
        assert second["image"].values[0].shape == (0, 2)
        assert second["image"].weights == (0,)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ((number for number in range(3)), "only once"),
        ({"x": np.ones(3)}, "iterates batches"),
        (3, "iterates batches"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DistributedDataset(dataset, replicator())


def test_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"different numbers of rows: \(3, 2\), \(4,\)"):
        distribute((np.ones((3, 2)), np.ones(4)), replicator())
    with pytest.raises(UsageError, match="one row per sample"):
        distribute((np.ones((3, 2)), np.float32(1)), replicator())
    with pytest.raises(UsageError, match="is empty"):
        distribute((), replicator())


class RefillsOneBuffer:
    def __iter__(self) -> Iterator[np.ndarray]:
        buffer = np.empty(4)
        for number in range(6):
            buffer[...] = number
            yield buffer


def test_a_dataset_may_refill_its_arrays() -> None:
    seen = []
    for batch in DistributedDataset(RefillsOneBuffer(), replicator()):
        time.sleep(0.01)  # long enough for the next batch to be made
        seen.append(batch.values[0].tolist())
    assert seen == [[number] * 4 for number in range(6)]
