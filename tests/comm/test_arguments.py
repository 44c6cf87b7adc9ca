"""Bad arguments get an error that says what was expected and what came."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator, replica_communicators
from tests.harness import run_threads, world_of_one


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """One of two members: a call that gets past its checks would wait for the other."""
    members = replica_communicators(world_of_one(), 2, name="arguments", timeout=1)
    yield members[1]
    for member in members:
        member.close()


@pytest.mark.parametrize(
    ("x", "options", "error", "says"),
    [
        ({1, 2}, {}, errors.UsageError, "takes an array or a number, but got set"),
        ("text", {}, errors.UsageError, "but got str"),
        ([1, "2"], {}, errors.UsageError, "item 1 of the list takes an array or a number"),
        ([np.ones(3)], {"out": np.ones(3)}, errors.UsageError, "out must be a list of 1 arrays"),
        ([np.ones(3)], {"out": [np.ones(2)]}, errors.ShapeError, "item 0 of out must have shape"),
        (np.ones(3, "i4"), {"prescale": 2}, errors.UnsupportedError, "does not scale int32"),
        (np.ones(3), {"op": "max", "postscale": 2}, errors.UnsupportedError, "does not scale"),
        (1 << 70, {}, errors.UsageError, "does not fit into 64 bits"),
        (np.ones(3), {"op": "summ"}, errors.UsageError, "did you mean 'sum'?"),
        (np.ones(3), {"op": "none"}, errors.UsageError, "unknown operator 'none'"),
        (np.ones(3), {"op": ["sum"]}, errors.UsageError, "unknown operator"),
        (
            np.ones(3, "longdouble"),
            {},
            errors.UnsupportedError,
            "[shared] replica 1 (rank 0): all_reduce with operator sum does not carry float128",
        ),
        (np.ones(3, ">f4"), {}, errors.UnsupportedError, "does not carry >f4"),
        (np.ones(3, "bool"), {}, errors.UnsupportedError, "does not carry bool"),
        (np.array(["a"]), {}, errors.UnsupportedError, "does not carry <U1"),
        (np.ones(3, "int64"), {"op": "mean"}, errors.UnsupportedError, "mean of integers"),
        (7, {"op": "mean"}, errors.UnsupportedError, "mean of integers"),
        (
            np.ones(3),
            {"out": [0] * 3},
            errors.UsageError,
            "out takes an array or a number, but got list",
        ),
        (np.array(3.0), {"out": 3.0}, errors.UsageError, "out must be an array, not float"),
        (np.ones(3), {"out": np.ones(4)}, errors.ShapeError, "shape (3,) and dtype float64"),
        (np.ones(3), {"out": np.ones(3, "f4")}, errors.ShapeError, "but has (3,) and float32"),
    ],
)
@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce(
    comm: Communicator,
    x: Any,
    options: dict[str, Any],
    error: type[Exception],
    says: str,
    async_op: bool,
) -> None:
    with pytest.raises(error) as caught:
        comm.all_reduce(x, **options, async_op=async_op)
    assert says in str(caught.value)


def test_outputs_that_overlap_the_input_partly_are_refused(comm: Communicator) -> None:
    memory = np.ones(20)
    with pytest.raises(errors.UsageError, match="out overlaps"):
        comm.all_reduce(memory[:10], out=memory[5:15])
    with pytest.raises(errors.UsageError, match="out overlaps"):
        comm.reduce_scatter(memory[:10], out=memory[:5])
    with pytest.raises(errors.UsageError, match="out overlaps"):
        comm.all_gather(memory[:10], out=memory)  # those are the rows of member 0


def test_a_read_only_output_is_refused(comm: Communicator) -> None:
    out = np.ones(3)
    out.flags.writeable = False
    with pytest.raises(errors.UsageError, match="out is read-only"):
        comm.all_reduce(np.ones(3), out=out)


def test_indivisible_rows_are_refused_with_both_numbers(comm: Communicator) -> None:
    for x in (np.ones((5, 2)), np.array(1.0)):
        with pytest.raises(errors.ShapeError, match="2 equal shares") as caught:
            comm.reduce_scatter(x)
        assert str(x.shape) in str(caught.value)


@pytest.mark.parametrize("root", [2, -1, "0", 0.5])
def test_a_root_that_is_no_rank_is_refused(comm: Communicator, root: Any) -> None:
    with pytest.raises(errors.UsageError, match="expected a rank from 0 to 1"):
        comm.broadcast(np.ones(3), root=root)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int64"])
def test_a_root_may_be_any_numpy_integer(kind: str) -> None:
    def member(comm: Communicator) -> int:
        return int(comm.broadcast(np.full(3, comm.rank), root=np.dtype(kind).type(1))[0])

    assert run_threads(member, 2) == [1, 1]


def test_more_elements_than_a_signature_counts_are_refused(
    comm: Communicator, tmp_path: Path
) -> None:
    count = (1 << 36) + 100_000  # a signature of 36 bits would say 100,000
    with (tmp_path / "sparse").open("w+b") as file:
        os.truncate(file.fileno(), count * 4)
        huge = np.asarray(np.memmap(file, "float32", "r+", shape=(count,)))
    for call in (comm.all_reduce, comm.broadcast):
        with pytest.raises(errors.UnsupportedError, match=f"but got {count}"):
            call(huge, out=huge)


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [(3, "longdouble", "dtype float128 is none"), ((2, -1), "float32", "negative length")],
)
def test_empty(comm: Communicator, shape: Any, dtype: str, says: str) -> None:
    with pytest.raises(errors.UsageError, match=says):
        comm.empty(shape, dtype)


def test_use_after_close_is_refused(comm: Communicator) -> None:
    comm.close()
    comm.close()
    for call in (
        lambda: comm.all_reduce(np.ones(3)),
        lambda: comm.broadcast(np.ones(3)),
        lambda: comm.empty(3),
        comm.barrier,
    ):
        with pytest.raises(errors.ClosedError, match="is closed"):
            call()


def test_a_communicator_needs_a_replica() -> None:
    with pytest.raises(errors.UsageError, match="needs a replica, but got 0"):
        replica_communicators(world_of_one(), 0, name="none")


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "3"])
def test_a_timeout_that_is_none_does_no_harm(comm: Communicator, timeout: Any) -> None:
    work = comm.barrier(async_op=True)
    assert work is not None
    with pytest.raises(errors.UsageError, match="takes a timeout in seconds"):
        work.wait(timeout)
    assert not work.done()  # it is alive still
    comm.abort("the other will not come")


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_no_operator_is_none(comm: Communicator, collective: str) -> None:
    with pytest.raises(errors.UsageError, match="unknown operator None"):
        getattr(comm, collective)(np.ones(4), op=None)


def test_a_root_is_a_number(comm: Communicator) -> None:
    roots: tuple[Any, ...] = (None, True, 2, -1, 0.0)
    for root in roots:
        with pytest.raises(errors.UsageError, match="expected a rank from 0 to 1"):
            comm.broadcast(np.ones(3), root=root)
