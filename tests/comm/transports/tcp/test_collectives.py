"""Every collective of the tcp transport, on each path a call can take, against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.core.work import Work
from allreduce.errors import MismatchError
from tests.comm.cases.collective_cases import whole
from tests.comm.cases.tcp_cases import (
    SIZES,
    exchanging,
    exchanging_different,
    gathering,
    new_output,
    reducing,
    run,
    scattering,
    spreading,
    start,
)
from tests.harness import run_threads, settle_threads

# Elements of one share: nothing, one that travels with the post, one hop, and chains of chunks.
LENGTHS = (0, 1, 1000, 30011, 300007)
DIFFERENT = (0, 3, 1000, 70001, 250003)  # by member


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")


@pytest.mark.parametrize("size", SIZES)
def test_equal_shares(size: int) -> None:
    def member(comm: Communicator) -> None:
        ops = itertools.cycle([("sum", "float32"), ("max", "int64"), ("mean", "float64")])
        for length in LENGTHS:
            reducing(comm, *next(ops)[:1], length, "float32")
            op, dtype = next(ops)
            reducing(comm, op, length, dtype)
            scattering(comm, [length] * comm.size, None)
            gathering(comm, [length] * comm.size, None)
            spreading(comm, length)
            exchanging(comm, length)

    run_threads(member, size)


@pytest.mark.parametrize("size", SIZES)
def test_shares_that_differ(size: int) -> None:
    def member(comm: Communicator) -> None:
        for counts in (DIFFERENT[:size], DIFFERENT[::-1][:size], (1, 0, 2, 0, 5)[:size]):
            scattering(comm, list(counts), counts)
            gathering(comm, list(counts), counts)
        for scale in (0, 1, 1000, 20011):
            exchanging_different(comm, scale)

    run_threads(member, size)


def test_means_are_the_sum_divided_once() -> None:
    def member(comm: Communicator) -> None:
        for dtype, length in itertools.product(("float32", "float64"), (9, 30011, 300007)):
            inputs = [whole(length, dtype, m) for m in range(comm.size)]
            out = run(comm, "all_reduce", inputs[comm.rank], new_output(length, dtype), op="mean")
            expected = (np.add.reduce(inputs) / comm.size).astype(dtype)
            np.testing.assert_array_equal(out, expected)
            assert not np.signbit(out[out == 0]).any()

    run_threads(member, 3)


def test_exchanges_that_do_not_fit_touch_no_output() -> None:
    outs = [new_output(90000) for _ in range(3)]

    def member(comm: Communicator) -> None:
        mine = (10000, 10000, 20000 if comm.rank == 0 else 10000)
        run(
            comm,
            *("all_to_all", new_output(sum(mine)) + 1, outs[comm.rank][:30000]),
            count=sum(mine),
            counts=mine,
            receives=(10000,) * 3,
        )

    for outcome in settle_threads(member, 3):
        assert isinstance(outcome, MismatchError), outcome
        assert "20000 elements go from replica 0 (rank 0) to replica 2 (rank 0)" in str(outcome)
        assert "which expects 10000" in str(outcome)
    assert all((out == 77).all() for out in outs)


def test_many_of_all_kinds_in_flight_with_several_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Staged, chained, small calls and messages at once, waited for in different orders."""
    monkeypatch.setenv("ALLREDUCE_TCP_CONNECTIONS", "2")

    def member(comm: Communicator) -> None:
        works: list[tuple[Work, int]] = []
        total = sum(range(comm.size))
        for index in range(160):
            length = (3, 2000, 90000, 400000)[index % 4]
            x = np.full(length, comm.rank + index, np.float32)
            expected = total + index * comm.size
            if index % 3:
                work = start(comm, "all_reduce", x, new_output(length), op="sum")
            else:
                share = length // comm.size
                x = x[: share * comm.size]
                work = start(comm, "reduce_scatter", x, new_output(share), op="sum", count=share)
            works.append((work, expected))
            to = (comm.rank + 1) % comm.size
            start(comm, "send", np.full(3000, index), None, root=to, tag=index)
            before = (comm.rank - 1) % comm.size
            work = start(comm, "recv", None, new_output(3000, "int64"), root=before, tag=index)
            works.append((work, index))
        for position in np.random.default_rng(comm.rank).permutation(len(works)):
            work, expected = works[position]
            assert (work.wait() == expected).all()

    run_threads(member, 3)


@pytest.mark.parametrize("connections", ["1", "4"])
def test_arrays_larger_than_any_buffer(connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TCP_CONNECTIONS", connections)
    length = 12_000_001

    def member(comm: Communicator) -> None:
        x = np.arange(length, dtype=np.int32) + comm.rank
        run(comm, "all_reduce", x, x, op="sum")
        total = sum(range(comm.size))
        np.testing.assert_array_equal(x, np.arange(length, dtype=np.int32) * comm.size + total)
        share = new_output(length // comm.size, "int32")
        run(comm, "reduce_scatter", x[: share.size * comm.size], share, op="max", count=share.size)
        np.testing.assert_array_equal(share, x[comm.rank * share.size :][: share.size])

    run_threads(member, 3)
