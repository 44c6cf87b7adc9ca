"""Bad arguments raise an error with the expected and the given value."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
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
    members = replica_communicators(world_of_one(), 2, name="arguments", timeout=20)
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
        (
            np.ones(3, ">f4"),
            {},
            errors.UnsupportedError,
            "does not carry >f4: its bytes are in another order than this machine's",
        ),
        (np.ones(3, "bool"), {}, errors.UnsupportedError, "does not carry bool"),
        (np.array(["a"]), {}, errors.UnsupportedError, "does not carry <U1"),
        (np.ones(3, "int64"), {"op": "mean"}, errors.UnsupportedError, "mean of integers"),
        (7, {"op": "mean"}, errors.UnsupportedError, "mean of integers"),
        (
            np.ones(3),
            {"out": [0] * 3},
            errors.UsageError,
            "out must be an array, but got list",
        ),
        (np.array(3.0), {"out": 3.0}, errors.UsageError, "out must be an array, but got float"),
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


def test_a_read_only_output_is_refused(comm: Communicator) -> None:
    out = np.ones(3)
    out.flags.writeable = False
    with pytest.raises(errors.UsageError, match="out is read-only; pass a writable array"):
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
    [
        (3, "longdouble", "dtype float128 is not"),
        (3, "foo", "'foo' is no dtype"),
        (3, 3, "3 is no dtype"),
        ((2, -1), "float32", "is negative"),
        ((1.5,), "float32", "no whole number"),
        ("12", "float32", "takes a length or a shape, but got '12'"),
        (None, "float32", "takes a length or a shape, but got None"),
        (True, "float32", "takes a length or a shape, but got True"),
    ],
)
def test_empty(comm: Communicator, shape: Any, dtype: Any, says: str) -> None:
    with pytest.raises(errors.UsageError, match=says):
        comm.empty(shape, dtype)


def test_bfloat16_without_the_package_that_numpy_has_it_by(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(errors.UsageError, match=r"replica 1 .*'bfloat16'.*pip install ml_d"):
        comm.empty(3, "bfloat16")


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


def test_no_machine_has_so_much_memory(comm: Communicator) -> None:
    with pytest.raises(
        errors.OutOfMemoryError, match=r"^\[shared\] replica 1 \(rank 0\): empty: no machine has"
    ):
        comm.empty(1 << 62)


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "gather", "all_to_all"])
def test_nothing_is_no_array(comm: Communicator, collective: str) -> None:
    with pytest.raises(errors.UsageError, match=f"{collective} takes an array or .* got None"):
        getattr(comm, collective)(None)


COUNTS: tuple[Any, ...] = (
    5,
    "11",
    [1.0, 1.0],
    ["a", "b"],
    {0, 1},
    [1 << 70, 1],
    [2, -1],
    [1, None],
)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter"])
def test_counts_that_are_none(comm: Communicator, collective: str, counts: Any) -> None:
    with pytest.raises(errors.UsageError, match=f"{collective} takes counts of 2 members' rows"):
        getattr(comm, collective)(np.ones(2), counts=counts)


def test_counts_that_can_be_read_once_only_are_none(comm: Communicator) -> None:
    with pytest.raises(errors.UsageError, match="takes counts of 2 members' rows"):
        comm.all_to_all(np.ones(2), counts=(1 for _ in range(2)))  # type: ignore[arg-type]


def test_more_than_a_signature_counts_is_refused_before_it_is_allocated(comm: Communicator) -> None:
    with pytest.raises(errors.UnsupportedError, match="carries fewer than"):
        comm.all_gather(np.ones((1, 8), np.int8), counts=[(1 << 35), 1])


def test_narrow_counts_do_not_wrap_around() -> None:
    counts: Any = np.array([200, 200], np.uint8)

    def member(comm: Communicator) -> tuple[int, int]:
        x = np.full(200, comm.rank + 1.0)
        joined = comm.all_gather(x, counts=counts)
        return int(joined.sum()), len(comm.reduce_scatter(joined, counts=counts))

    assert run_threads(member, 2) == [(600, 200)] * 2


def test_integers_whose_sum_could_wrap_around_are_refused(comm: Communicator) -> None:
    for x in (1 << 62, -(1 << 62)):
        for call in (x, [x]):
            with pytest.raises(errors.UsageError, match="sums Python integers in 64 bits"):
                comm.all_reduce(call)


def test_the_largest_integers_sum_exactly() -> None:
    most = (1 << 62) - 1
    assert run_threads(lambda comm: comm.all_reduce(most), 2) == [2 * most] * 2
    assert run_threads(lambda comm: comm.all_reduce(most + 1, op="max"), 2) == [most + 1] * 2


def test_an_array_of_another_member_than_a_scatters_root_is_refused_before_the_call() -> None:
    def member(comm: Communicator) -> Any:
        if comm.rank == 1:
            with pytest.raises(errors.UsageError, match=r"on its root only, which is replica 0"):
                comm.scatter(np.ones(2))
        return comm.scatter(np.arange(2) if comm.rank == 0 else None)[0]

    assert run_threads(member, 2) == [0, 1]


def test_a_scatter_that_its_root_cannot_make_fails_on_all() -> None:
    structured = np.zeros(2, [("a", "<f4")])

    def member(comm: Communicator, x: Any) -> list[str]:
        said = []
        roots: tuple[Any, ...] = (1, np.array([0, 1]), 2)
        for root in roots:
            try:
                comm.scatter(x if comm.rank == 1 else None, root=root)
            except errors.AllreduceError as error:
                said.append(f"{type(error).__name__} {error}")
        assert comm.all_reduce(1) == 2  # it lives
        return said

    for x, name in ((structured, "[('a', '<f4')]"), (np.zeros(2, "M8[s]"), "datetime64[s]")):
        for said in run_threads(lambda comm, x=x: member(comm, x), 2):  # type: ignore[misc]
            assert said[0].startswith("UnsupportedError")
            assert f"replica 1 (rank 0): scatter does not carry {name}" in said[0]
            assert all("scatter got root=" in text for text in said[1:])


def test_more_members_than_a_signature_can_name_are_refused() -> None:
    with pytest.raises(errors.UnsupportedError, match=r"at most 4096 members, but .* be 4097"):
        replica_communicators(world_of_one(), 4097, name="crowd")


@pytest.mark.parametrize(
    ("x", "out", "says"),
    [
        (np.ones(6)[::2], np.ones(3), "x must be a contiguous NumPy array to be used again"),
        (np.ones(3), np.ones(6)[::2], "out must be a contiguous NumPy array"),
        ([1.0, 2.0], np.ones(2), "but is list; call all_reduce each time instead"),
        (np.ones(3), np.ones(4), "shape (3,) and dtype float64"),
    ],
)
def test_a_call_prepared_for_many_needs_arrays_as_they_are(
    comm: Communicator, x: Any, out: Any, says: str
) -> None:
    with pytest.raises(errors.UsageError) as caught:
        comm.all_reduce_init(x, out=out)
    assert says in str(caught.value)


def test_a_prepared_call_ends_with_its_communicator(comm: Communicator) -> None:
    begin = comm.all_reduce_init(np.ones(3), out=np.ones(3))
    comm.close()
    with pytest.raises(errors.ClosedError, match="is closed"):
        begin()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda comm: comm.all_reduce(np.ones(3, bool), op="mean"),
            "float64 to get the fraction of",
        ),
        (lambda comm: comm.all_reduce("abc"), "broadcast_object and all_gather_object take"),
        (lambda comm: comm.all_reduce({"a": 1}), "broadcast_object and all_gather_object take"),
        (
            lambda comm: comm.all_reduce([np.ones(3)] * 2, out=[np.ones(3)]),
            "out must be a list of 2 arrays, but has 1",
        ),
    ],
)
def test_remedies_work(call: Callable[[Communicator], Any], says: str) -> None:
    def member(comm: Communicator) -> None:
        with pytest.raises(errors.AllreduceError, match=says):
            call(comm)

    run_threads(member, 1)
