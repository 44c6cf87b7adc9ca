"""Calls that are cut into pieces, and the ranges of strided arrays that these are made of."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator, pieces
from allreduce.comm.checks import Context
from allreduce.comm.pieces import of_shares, of_whole
from allreduce.comm.spread import Spread
from allreduce.errors import MismatchError, OutOfMemoryError
from tests.comm.drawn import LAYOUTS, laid
from tests.harness import run_threads, settle_threads

SHAPES = [(2, 3, 2), (), (0, 3), (3,), (2, 1, 2)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pieces of 4 doubles."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 32)
    monkeypatch.setattr(pieces, "WHOLE_BYTES", 64)


@pytest.mark.parametrize("layout", LAYOUTS[:-1])
def test_any_range_is_read_and_written(layout: str) -> None:
    whole = np.arange(sum(int(np.prod(shape)) for shape in SHAPES), dtype=float)
    parts = np.split(whole, np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1])
    arrays = [laid(part.reshape(s), layout) for part, s in zip(parts, SHAPES, strict=True)]
    spread = Spread(arrays)
    assert spread.size == whole.size
    for low, high in itertools.combinations(range(whole.size + 1), 2):
        into = np.empty(high - low)
        spread.read(low, high, 2, into)
        np.testing.assert_array_equal(into, 2 * whole[low:high])
        run = spread.run(low, high)
        assert run is None or (run == whole[low:high]).all()
        whole[low:high] += 1
        spread.write(low, high, 0.5, 2 * whole[low:high])
        got = np.concatenate([array.reshape(-1) for array in arrays])
        np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize("shares", [(5, 5), (0, 11, 2), (1, 0, 100)])
@pytest.mark.usefixtures("small")
def test_pieces_hold_every_element_once(shares: tuple[int, ...]) -> None:
    cuts = [list(of_shares(shares, me, 8)) for me in range(len(shares))]
    alike = [[(step.given, step.counts) for step in steps] for steps in cuts]
    assert all(steps == alike[0] for steps in alike)
    for steps in (cuts[0], list(of_whole(sum(shares), 8))):
        assert max(step.count for step in steps) <= 4 + len(shares)
        ranges = (range(low, high) for step in steps for low, high in step.given)
        assert sorted(i for each in ranges for i in each) == list(range(sum(shares)))
    for me, count in enumerate(shares):
        taken = [step.taken for step in cuts[me]]
        assert [i for low, high in taken for i in range(low, high)] == list(range(count))


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.usefixtures("small")
def test_a_factor_behind_a_large_reduction_takes_no_memory(collective: str) -> None:
    def member(comm: Communicator) -> None:
        x = np.ones(1 << 17)
        call = getattr(comm, collective)
        call(x, postscale=2)  # what is made once is there
        tracemalloc.start()
        try:
            got = call(x, postscale=2)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        np.testing.assert_array_equal(got, 2 * x)
        assert most < 1.5 * x.nbytes, f"{most / x.nbytes:.2f} times the result"

    run_threads(member, 1)


@pytest.mark.usefixtures("small")
def test_outputs_in_any_order_among_the_inputs() -> None:
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
        with pytest.raises(MismatchError, match=r"all_reduce\(\[float64\[20\], float64\[20\]\]"):
            comm.all_reduce(arrays, out=out, **given)
        assert not np.concatenate(out, axis=None).any()

    for outcome in settle_threads(member, 2):
        assert outcome is None


@pytest.mark.usefixtures("small")
def test_shares_with_fewer_elements_than_there_are_pieces() -> None:
    def member(comm: Communicator) -> None:
        x, (low, high) = np.arange(20.0), ((0, 19), (19, 20))[comm.rank]
        for gaps in (1, 2):
            out = np.zeros(gaps * (high - low))[::gaps]
            comm.reduce_scatter(x, counts=[19, 1], prescale=0.5, out=out)
            np.testing.assert_array_equal(out, x[low:high])
        got = comm.reduce_scatter(x, counts=[20, 0], prescale=0.5)
        np.testing.assert_array_equal(got, x[: 0 if comm.rank else 20])

    run_threads(member, 2)


@pytest.mark.usefixtures("small")
def test_no_memory_for_a_strided_share_is_found_before_the_first_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def few(context: Context, shape: tuple[int, ...], dtype: Any) -> Any:
        if context.rank == 1:
            made.append(len(made))
            if len(made) == 4:
                raise OutOfMemoryError("none left")
        return np.empty(shape, dtype)

    monkeypatch.setattr(pieces, "room", few)

    def member(comm: Communicator) -> None:
        x, out = np.arange(20.0), np.zeros(20)[::2]
        if comm.rank == 1:
            with pytest.raises(OutOfMemoryError):
                comm.reduce_scatter(x, prescale=0.5, out=out)
        comm.reduce_scatter(x, prescale=0.5, out=out)
        np.testing.assert_array_equal(out, x[10 * comm.rank :][:10])

    run_threads(member, 2)


@pytest.mark.usefixtures("small")
def test_counts_that_differ_are_found_before_first_pieces_that_are_equal() -> None:
    def member(comm: Communicator) -> None:
        counts = [16, 4] if comm.rank else [18, 2]
        out = np.zeros(counts[comm.rank])
        with pytest.raises(MismatchError, match=r"counts=\[1[68], [24]\]\)"):
            comm.reduce_scatter(np.ones(20), counts=counts, prescale=0.5, out=out)
        assert not out.any()

    for outcome in settle_threads(member, 2):
        assert outcome is None


@pytest.mark.usefixtures("small")
def test_calls_meanwhile_come_after_the_last_piece() -> None:
    def member(comm: Communicator) -> None:
        x, y, z = (np.full(50, value) for value in (1.0, 2.0, 3.0))
        works = [
            comm.all_reduce([x, x], async_op=True),
            comm.all_reduce(y, out=y, async_op=True),
            comm.all_reduce(z, prescale=0.5, out=z, async_op=True),
        ]
        for work in works[:: 1 - 2 * comm.rank]:
            work.wait()
        np.testing.assert_array_equal(
            [*works[0].wait(), y, z], [[2] * 50, [2] * 50, [4] * 50, [3] * 50]
        )

    run_threads(member, 2)


@pytest.mark.usefixtures("small")
def test_the_plan_tells_the_pieces() -> None:
    def ask(comm: Communicator) -> None:
        x = np.ones(11)
        planned = comm.plan("all_reduce", x, prescale=0.5, out=x)
        assert [part.call for part in planned.parts] == [
            *["all_reduce(float64[4], op='sum')"] * 2,
            "all_reduce(float64[3], op='sum')",
        ]
        assert "\n  2 times all_reduce(float64[4]" in str(planned)
        assert str(planned).startswith("all_reduce(float64[11], op='sum', prescale=0.5): 3 calls,")
        assert planned.read == x.nbytes + sum(part.read or 0 for part in planned.parts)
        np.testing.assert_array_equal(x, 1)
        listed = comm.plan("broadcast", [x, x], root=1)
        assert listed.call == "broadcast([float64[11], float64[11]], root=1)"
        assert len(listed.parts) == 6  # of 22 elements
        several = comm.plan("all_reduce", [x, x, np.ones(5, "i4")])
        assert [part.call for part in several.parts][-1] == "all_reduce(int32[5], op='sum')"
        assert len(comm.plan("all_reduce", [x]).parts) == 1

    run_threads(ask, 2)
