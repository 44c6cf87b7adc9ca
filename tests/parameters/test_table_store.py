"""Rows of tables: duplicates, updates of touched rows, synchronous shares, restarts."""

from __future__ import annotations

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import ShapeError
from allreduce.optim.base import Optimizer
from allreduce.parameters.table_store import TableStore, add_duplicates, rows_of_servers


def store(first: int = 0, stop: int = 10) -> TableStore:
    made = TableStore("table", first, stop, 2, "float32")
    made.fill(first, np.arange(first, stop, dtype=np.float32).repeat(2), last=True)
    return made


def test_duplicates_are_added_in_the_order_of_rows() -> None:
    numbers, gradients = np.asarray([5, 2, 5, 0]), np.arange(8.0).reshape(4, 2)
    rows, sums = add_duplicates(numbers, gradients)
    assert rows.tolist() == [0, 2, 5]
    assert sums.tolist() == [[6, 7], [2, 3], [4, 6]]
    rows, sums = add_duplicates(np.zeros(0, np.int64), np.zeros((0, 2)))
    assert len(rows) == len(sums) == 0


def test_ranges_cover_all_rows() -> None:
    assert rows_of_servers(10, 3) == [(0, 3), (3, 6), (6, 10)]
    assert rows_of_servers(1, 2) == [(0, 0), (0, 1)]


def test_only_touched_rows_and_their_moments_change() -> None:
    made = store(4, 10)
    made.configure(ar.optim.Adam(0.1))
    before = made.parameters.copy()
    gradients = np.ones((2, 2), np.float32)
    for update in range(2):
        made.push_rows(np.asarray([5, 8]), gradients, 1.0, update, "a", update + 1)
    made.push_rows(np.asarray([5, 8]), gradients, 1.0, 0, "a", 2)  # repeated
    assert made.version == 2
    changed = (made.parameters != before).reshape(-1, 2).all(axis=1)
    assert (np.flatnonzero(changed) + 4).tolist() == [5, 8]
    assert made.slots["m"].reshape(-1, 2).any(axis=1).tolist() == changed.tolist()
    whole = ar.optim.Adam(0.1)  # which changes the same rows as a dense update does
    rows, slots = np.asarray([5, 5, 8, 8], np.float32), {n: np.zeros(4, np.float32) for n in "mv"}
    for step in (1, 2):
        whole.update(rows, np.ones(4, np.float32), slots, np.ones(1, np.float32), step)
    np.testing.assert_array_equal(made.lookup(np.asarray([5, 8])).reshape(-1), rows)


@pytest.mark.parametrize("optimizer", [ar.optim.Adam(0.1), ar.optim.SGD(0.1, clip_value=0.5)])
def test_an_update_of_many_rows_is_that_of_each(optimizer: Optimizer) -> None:
    random, size = np.random.default_rng(0), 50_000
    made = store(0, size)
    made.configure(optimizer)
    rows = np.sort(random.choice(size, 40_000, replace=False))  # of several blocks
    gradients = random.standard_normal((len(rows), 2)).astype(np.float32)
    expected = made.lookup(rows).reshape(-1)
    slots = {name: np.zeros_like(expected) for name in optimizer.all_slots}
    update = optimizer.bucket_update([("table", slice(0, expected.size))])
    update(expected, gradients.reshape(-1).copy(), slots, np.full(1, 4.0, np.float32), 1)
    made.push_rows(rows, gradients, 4.0, 0)
    np.testing.assert_array_equal(made.lookup(rows).reshape(-1), expected)
    for name, each in slots.items():
        np.testing.assert_array_equal(made.slots[name].reshape(-1, 2)[rows].reshape(-1), each)
    untouched = np.setdiff1d(np.arange(size), rows)
    assert (made.lookup(untouched) == untouched[:, None]).all()


def test_rows_that_have_values_are_not_filled_again() -> None:
    made = store()
    made.fill(3, np.full(4, -1.0, np.float32), last=False)  # of a worker that began before
    assert made.lookup(np.asarray([3, 4])).tolist() == [[3, 3], [4, 4]]


def test_shares_of_an_update_are_joined() -> None:
    together, apart = store(), store()
    for each in (together, apart):
        each.configure(ar.optim.Adagrad(0.5))
    ones = np.ones((2, 2), np.float32)
    together.push_rows(np.asarray([1, 2, 3]), np.asarray([[1, 1], [2, 2], [1, 1]], "f4"), 4.0, 0)
    apart.contribute_rows(np.asarray([1, 2]), ones, 3.0, 0, share=0, of=2)
    assert apart.version == 0
    apart.contribute_rows(np.asarray([2, 3]), ones, 1.0, 0, share=1, of=2)
    np.testing.assert_array_equal(apart.parameters, together.parameters)


def test_rows_of_another_server_are_refused() -> None:
    with pytest.raises(ShapeError, match="server of 4 to 9"):
        store(4, 10).lookup(np.asarray([3]))


def test_an_update_that_lost_shares_does_not_take_the_next_one_with_it() -> None:
    made = store()
    made.configure(ar.optim.SGD(1.0))
    rows, ones = np.asarray([1, 2]), np.ones((2, 2), np.float32)
    made.contribute_rows(rows, ones, 1.0, 7, share=0, of=2)  # the other one went elsewhere
    assert not made.applied(7, 0.0)
    made.lose(7)
    assert made.applied(7, 0.0)
    made.contribute_rows(rows, ones, 1.0, 8, share=0, of=2)
    made.lose(7)  # of a slower worker
    made.contribute_rows(rows, ones, 1.0, 8, share=1, of=2)
    assert made.version == 1
    made.contribute_rows(rows, ones, 1.0, 9, share=0, of=2)
    assert made.applied(8, 0.0)
