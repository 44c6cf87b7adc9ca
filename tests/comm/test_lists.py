"""A list of arrays as one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator, lists, replica_communicators
from tests.harness import run_threads, settle_threads, world_of_one


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """One of two members: a call that gets past its checks would wait for the other."""
    members = replica_communicators(world_of_one(), 2, name="lists", timeout=20)
    yield members[1]
    for member in members:
        member.close()


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_items_of_all_kinds_come_back_as_they_are() -> None:
    def member(comm: Communicator) -> None:
        items = [
            np.matrix([[1.0, 2.0]]),
            np.ones(3),
            np.ones((2, 2), "i4"),
            4,
            2.5,
            np.ones((0, 3)),
            np.float32(1),
        ]
        got = comm.all_reduce(items)
        assert [np.asarray(one).shape for one in got] == [np.asarray(one).shape for one in items]
        assert [type(one) for one in got[3:5]] == [int, float]
        for one, item in zip(got, items, strict=True):
            np.testing.assert_array_equal(one, 2 * np.asarray(item))

    run_threads(member, 2)


@pytest.mark.parametrize("dtypes", [("f4",), ("f4", "f4"), ("f4", "f8"), ("f4", "f8", "f4")])
def test_outputs_may_be_the_inputs_in_any_order(dtypes: tuple[str, ...]) -> None:
    def member(comm: Communicator) -> None:
        items = [np.full(3, i + 1, dtype) for i, dtype in enumerate(dtypes)]
        assert comm.all_reduce(items, out=items) is items
        for i, item in enumerate(items):
            np.testing.assert_array_equal(item, 2 * (i + 1))

    run_threads(member, 2)


def test_outputs_that_are_other_items_inputs_get_their_own_results() -> None:
    def member(comm: Communicator) -> None:
        a, b = np.full(3, 1.0), np.full(3, 2.0)
        comm.all_reduce([a, b], out=[b, a])
        np.testing.assert_array_equal([a, b], [[4] * 3, [2] * 3])
        c, d = np.full(3, 1, "f4"), np.full(3, 2, "i4")
        places = [d.view("f4"), c.view("i4")]
        for got, wanted in zip(comm.all_reduce([c, d], out=places), (2, 4), strict=True):
            np.testing.assert_array_equal(got, wanted)

    run_threads(member, 2)


def test_a_list_of_one_array_is_not_packed() -> None:
    """The array itself takes part: nothing as large is allocated."""

    def member(comm: Communicator) -> None:
        seen: list[Any] = []
        start = comm._dispatch.transport.start

        def spy(call: Any, x: Any, out: Any, result: Any) -> Any:
            seen.extend((x, out))
            return start(call, x, out, result)

        comm._dispatch.transport.start = spy  # type: ignore[method-assign]
        x = np.ones((4, 5))
        comm.all_reduce([x], out=[x])
        assert all(np.shares_memory(one, x) for one in seen)
        np.testing.assert_array_equal(x, 2)

    run_threads(member, 2)


def test_lists_of_nothing_give_nothing() -> None:
    def member(comm: Communicator) -> None:
        out: list[Any] = []
        assert comm.all_reduce([]) == comm.broadcast([]) == []
        assert comm.all_reduce([], out=out) is out
        assert comm.reduce([], root=1) == ([] if comm.rank == 1 else None)

    run_threads(member, 2)


WRONG: tuple[tuple[Any, type[Exception], str], ...] = (
    ([np.ones(2, ">f4")], errors.UnsupportedError, "item 0 of the list does not carry >f4"),
    ([1.0, np.ma.array([1.0], mask=[False])], errors.UsageError, "item 1 of the list got a masked"),
    ([None], errors.UsageError, "item 0 of the list takes an array or a number, but got None"),
)


@pytest.mark.parametrize(("items", "error", "says"), WRONG)
def test_an_item_is_refused_as_it_would_be_alone(
    comm: Communicator, items: Any, error: type[Exception], says: str
) -> None:
    where = r"^\[shared\] replica 1 \(rank 0\): broadcast: "
    with pytest.raises(error, match=where + says):
        comm.broadcast(items)


def test_a_collective_of_no_lists_says_so(comm: Communicator) -> None:
    with pytest.raises(errors.UsageError, match=r"rank 0\): all_gather takes one array"):
        comm.all_gather([np.ones(2)])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let arrays of 4 doubles or more go by themselves."""
    monkeypatch.setattr(lists, "ALONE_BYTES", 32)


@pytest.mark.usefixtures("small")
def test_large_arrays_go_as_they_lie_and_small_ones_packed() -> None:
    def member(comm: Communicator) -> None:
        seen: list[Any] = []
        start = comm._dispatch.transport.start

        def spy(call: Any, x: Any, out: Any, result: Any) -> Any:
            seen.append((call.count, x))
            return start(call, x, out, result)

        comm._dispatch.transport.start = spy  # type: ignore[method-assign]
        a, b, c, d = np.ones(2), np.ones((2, 5)), np.ones(1), np.ones(7)
        out = [np.zeros(2), b, c, np.zeros((7, 2))[:, 0]]
        got = comm.all_reduce([a, b, c, d], out=out, prescale=0.5, postscale=4)
        assert got is out
        for array in got:
            np.testing.assert_array_equal(array, 4)
        assert [count for count, _ in seen] == [3, 10, 7]
        assert (a.max(), d.max()) == (1, 1)
        seen.clear()
        got = comm.all_reduce([a, b, c, d])
        assert np.shares_memory(seen[1][1], b)
        assert [array.tolist() for array in got] == [(2 * x).tolist() for x in (a, b, c, d)]

    run_threads(member, 2)


@pytest.mark.usefixtures("small")
def test_outputs_in_any_order_among_large_inputs() -> None:
    def member(comm: Communicator) -> None:
        for order in itertools.permutations(range(4)):
            items = [np.arange(7.0) + i for i in range(4)]
            wanted = [2 * item for item in items]
            out = [items[i] for i in order]
            for got, right in zip(comm.all_reduce(items, out=out), wanted, strict=True):
                np.testing.assert_array_equal(got, right)

    run_threads(member, 2)


@pytest.mark.parametrize(
    "others",
    [
        lambda x: ([x, x[:-1]], {}),
        lambda x: ([x, x[:2]], {}),
        lambda x: ([x, x], {"op": "max"}),
        lambda x: ([x, x], {"prescale": 2.0}),
        lambda x: (np.concatenate([x, x]), {}),
        lambda x: (np.concatenate([x, x]), {"prescale": 2.0}),
    ],
)
@pytest.mark.usefixtures("small")
def test_members_that_differ_anywhere_find_out_before_any_output_is_touched(others: Any) -> None:
    def member(comm: Communicator) -> None:
        x = np.ones(20)
        arrays, given = others(x) if comm.rank else ([x, x], {})
        out = [np.zeros_like(one) for one in arrays]
        out = out if isinstance(arrays, list) else np.zeros_like(arrays)
        with pytest.raises(
            errors.MismatchError, match=r"all_reduce\(\[float64\[20\], float64\[20\]\]"
        ):
            comm.all_reduce(arrays, out=out, **given)
        assert not np.concatenate(out, axis=None).any()

    for outcome in settle_threads(member, 2):
        assert outcome is None
