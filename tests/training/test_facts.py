"""What a rank is told that refuses something while the others are elsewhere."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.errors import MismatchError, ShapeError
from allreduce.training import raising_on_all_ranks
from allreduce.training.facts import SAME_ARRAYS, array, check_equal, digest
from tests.harness import run_threads, settle_threads


def test_a_rank_keeps_its_own_error_where_the_others_make_another_call() -> None:
    def one(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.barrier()
        with raising_on_all_ranks(comm, "fit"):
            raise ShapeError("there is no axis 5")

    refused, elsewhere = settle_threads(one, 2)
    assert isinstance(refused, ShapeError)
    assert str(refused) == "fit on rank 0: there is no axis 5"
    (note,) = refused.__notes__
    assert note.startswith("the other ranks could not be told: [shared] replica 0 (rank 0): ")
    assert "barrier() at " in note
    assert isinstance(elsewhere, MismatchError)
    here = rf"{re.escape(Path(__file__).name)}:\d+ "
    assert re.search(
        rf"exchange\(a comparison of what ranks gave to fit\) at \S+{here}", str(elsewhere)
    )


def test_a_rank_says_nothing_of_another_that_has_ended_by_the_same_error() -> None:
    def one(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.05)  # the other one tells it by then
            comm.abort("its program ended with ShapeError: there is no axis 5")
            return
        with raising_on_all_ranks(comm, "fit"):
            raise ShapeError("there is no axis 5")

    _, refused = settle_threads(one, 2)
    assert isinstance(refused, ShapeError)
    assert not hasattr(refused, "__notes__")


def test_an_error_that_speaks_of_another_rank_is_told_with_its_own() -> None:
    def one(comm: Communicator) -> None:
        comm.barrier()
        with raising_on_all_ranks(comm, "fit"):
            raise ShapeError(f"rank {comm.rank}0 has no axis 5")

    assert [str(error) for error in settle_threads(one, 2)] == [
        "fit on rank 0: rank 00 has no axis 5",
        "fit on rank 1: rank 10 has no axis 5",
    ]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([5, 6, 7, 8], "one value on rank 0, another on rank 1, another on rank 2 but another on "),
        ([5, 5, 6, 5], "one value on ranks 0, 1, 3 but another on rank 2; load the same on every"),
        ([5, 6, 6, 5], "one value on ranks 0, 3 but another on ranks 1, 2; load the same on every"),
        ([5, 6, 7, 5], "one value on ranks 0, 3, another on rank 1 but another on rank 2; load"),
    ],
)
def test_arrays_that_differ_are_told_with_the_ranks_that_agree(rows: list[int], told: str) -> None:
    def one(comm: Communicator) -> str:
        mine = np.array(rows[comm.rank : comm.rank + 1])
        with pytest.raises(MismatchError) as raised:
            check_equal(comm, "fit", {"x": array(mine, SAME_ARRAYS)})
        return str(raised.value)

    for rank, error in enumerate(run_threads(one, 4)):
        assert error.startswith(f"fit on rank {rank}: x, int64 (1,), has {told}")


def test_a_digest_reads_a_sample_of_a_large_array() -> None:
    huge = np.broadcast_to(np.float32(1), (1 << 20, 1 << 20))  # 4 TiB: nobody could read it all
    assert digest(huge) == digest(huge.T)


def test_a_digest_depends_on_values_and_order_and_not_on_layout() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(3000, 28)).astype(np.float32)
    rows[:, :14] = 0  # margins of images
    seen = digest(rows)
    assert digest(rows[random.permutation(3000)]) != seen
    assert digest(np.asfortranarray(rows)) == digest(np.tile(rows, 2)[:, :28]) == seen
    rows *= 2  # the same array, changed in place
    assert digest(rows) != seen
    labels = random.integers(0, 2, 4096)
    seen = digest(labels)
    labels[2049] ^= 1  # every value of a small array counts
    assert digest(labels) != seen


@pytest.mark.parametrize("columns", [1, 2, 3, 12, 15, 28])
def test_a_digest_reads_every_column(columns: int) -> None:
    rows = np.zeros((9 * 4096, columns), np.float32)
    seen = {digest(rows)}
    for column in range(columns):
        rows[:] = 0
        rows[:, column] = 1
        seen.add(digest(rows))
    assert len(seen) == columns + 1
