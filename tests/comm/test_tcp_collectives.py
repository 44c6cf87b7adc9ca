"""Every collective of the tcp transport, on each path a call can take, against NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator, tcp_calls
from allreduce.comm.base import Array, Work
from allreduce.comm.call import Call
from allreduce.comm.choosing import Table
from allreduce.errors import MismatchError, UnsupportedError
from tests.comm.cases import whole
from tests.harness import run_threads, settle_threads

SIZES = (1, 2, 3, 5)
ANY = -1
# Elements of one share: nothing, one that travels with the post, one hop, and chains of chunks.
LENGTHS = (0, 1, 1000, 30011, 300007)
DIFFERENT = (0, 3, 1000, 70001, 250003)  # by member


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")


def start(
    comm: Communicator, collective: str, x: Array | None, out: Array | None, **facts: Any
) -> Work:
    """Start a call on the transport itself; `count` is that of `x` unless given."""
    some = x if x is not None else out
    assert some is not None
    names = {"op": None, "dtype": str(some.dtype), "count": some.size, "root": None}
    call = Call(collective, group="test", **{**names, **facts})
    return comm._transport.start(call, x, out, lambda: out)


def run(
    comm: Communicator, collective: str, x: Array | None, out: Array | None, **facts: Any
) -> Any:
    return start(comm, collective, x, out, **facts).wait()


def room(length: int, dtype: str = "float32") -> Array:
    return np.full(length, 77, dtype)


def shares(counts: list[int], array: Array) -> list[Array]:
    return np.split(array, np.cumsum(counts)[:-1])


def reducing(comm: Communicator, op: str, length: int, dtype: str) -> None:
    inputs = [whole(length, dtype, member) for member in range(comm.size)]
    folds: dict[str, Any] = {"sum": np.add, "max": np.maximum, "mean": np.add}
    expected = folds[op].reduce(inputs, axis=0, dtype=dtype)
    if op == "mean":
        expected = (expected / comm.size).astype(dtype)
    mine = inputs[comm.rank]
    np.testing.assert_array_equal(
        run(comm, "all_reduce", mine, room(length, dtype), op=op), expected
    )
    for root in {0, comm.size - 1}:
        out = room(length, dtype) if comm.rank == root else None
        result = run(comm, "reduce", mine, out, op=op, root=root)
        if out is not None:
            np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(mine, inputs[comm.rank])
    x = mine.copy()
    np.testing.assert_array_equal(run(comm, "all_reduce", x, x, op=op), expected)


def scattering(comm: Communicator, counts: list[int], listed: tuple[int, ...] | None) -> None:
    inputs = [whole(sum(counts), "float32", member) for member in range(comm.size)]
    expected = shares(counts, np.add.reduce(inputs))[comm.rank]
    out = room(counts[comm.rank])
    facts = {"count": sum(counts) if listed else counts[0], "counts": listed}
    run(comm, "reduce_scatter", inputs[comm.rank], out, op="sum", **facts)
    np.testing.assert_array_equal(out, expected)
    for root in {0, comm.size - 1}:
        x = inputs[root] if comm.rank == root else None
        out = room(counts[comm.rank])
        run(comm, "scatter", x, out, root=root, **facts)
        np.testing.assert_array_equal(out, shares(counts, inputs[root])[comm.rank])


def gathering(comm: Communicator, counts: list[int], listed: tuple[int, ...] | None) -> None:
    inputs = [whole(count, "int64", member) for member, count in enumerate(counts)]
    facts = {"count": sum(counts) if listed else counts[0], "counts": listed}
    out = room(sum(counts), "int64")
    run(comm, "all_gather", inputs[comm.rank], out, **facts)
    np.testing.assert_array_equal(out, np.concatenate(inputs))
    out[:] = 0
    own = shares(counts, out)[comm.rank]
    own[:] = inputs[comm.rank]
    run(comm, "all_gather", own, out, **facts)  # in place
    np.testing.assert_array_equal(out, np.concatenate(inputs))
    for root in {0, comm.size - 1}:
        target = room(sum(counts), "int64") if comm.rank == root else None
        run(comm, "gather", inputs[comm.rank], target, root=root, **facts)
        if target is not None:
            np.testing.assert_array_equal(target, np.concatenate(inputs))


def spreading(comm: Communicator, length: int) -> None:
    for root in {0, comm.size - 1}:
        out = room(length)
        x = whole(length, "float32", root) if comm.rank == root else out
        run(comm, "broadcast", x, out, root=root)
        np.testing.assert_array_equal(out, whole(length, "float32", root))


def exchanging(comm: Communicator, length: int) -> None:
    inputs = [whole(length * comm.size, "float32", member) for member in range(comm.size)]
    out = room(length * comm.size)
    run(comm, "all_to_all", inputs[comm.rank], out, count=length)
    parts = [array[comm.rank * length :][:length] for array in inputs]
    np.testing.assert_array_equal(out, np.concatenate(parts))


def exchanging_different(comm: Communicator, scale: int) -> None:
    sends = [[(a * 3 + b * 5) % 7 * scale for b in range(comm.size)] for a in range(comm.size)]
    inputs = [whole(sum(counts), "float32", a) for a, counts in enumerate(sends)]
    receives = [sends[a][comm.rank] for a in range(comm.size)]
    out = room(sum(receives))
    mine = sends[comm.rank]
    facts = {"count": sum(mine), "counts": tuple(mine), "receives": tuple(receives)}
    run(comm, "all_to_all", inputs[comm.rank], out, **facts)
    parts = [shares(counts, array)[comm.rank] for counts, array in zip(sends, inputs, strict=True)]
    np.testing.assert_array_equal(out, np.concatenate(parts))


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


@pytest.mark.parametrize("dtype", ["float16", "int8", "int16", "uint64", "bool", "complex64"])
def test_types_of_other_sizes(dtype: str) -> None:
    """Sums of 16-bit floats are rounded once: exactly what float32 gives."""

    def member(comm: Communicator) -> None:
        op = "logical_or" if dtype == "bool" else "sum"
        for length in (7, 5003, 400009):
            draw = [np.random.default_rng(m) for m in range(comm.size)]
            wide: list[Array] = [
                r.integers(0, 100, length) / (8 if dtype == "float16" else 1) for r in draw
            ]
            inputs = [array.astype(dtype) for array in wide]
            out = room(length, dtype)
            run(comm, "all_reduce", inputs[comm.rank], out, op=op)
            if dtype == "bool":
                expected = np.logical_or.reduce(inputs)
            elif dtype == "float16":
                expected = np.add.reduce([array.astype("float32") for array in inputs]).astype(
                    dtype
                )
            else:
                expected = np.add.reduce(inputs, axis=0, dtype=dtype)
            np.testing.assert_array_equal(out, expected)

    run_threads(member, 3)


def test_means_are_the_sum_divided_once() -> None:
    def member(comm: Communicator) -> None:
        for dtype, length in itertools.product(("float32", "float64"), (9, 30011, 300007)):
            inputs = [whole(length, dtype, m) for m in range(comm.size)]
            out = run(comm, "all_reduce", inputs[comm.rank], room(length, dtype), op="mean")
            expected = (np.add.reduce(inputs) / comm.size).astype(dtype)
            np.testing.assert_array_equal(out, expected)
            assert not np.signbit(out[out == 0]).any()

    run_threads(member, 3)


def test_results_are_equal_on_all_members_to_the_bit() -> None:
    def member(comm: Communicator) -> list[bytes]:
        digests = []
        for length in (100, 30011, 300007):
            x = np.random.default_rng(comm.rank).standard_normal(length).astype("float32")
            digests.append(run(comm, "all_reduce", x, room(length), op="sum").tobytes())
        return digests

    first, *others = run_threads(member, 4)
    assert all(other == first for other in others)


@pytest.mark.parametrize("connections", ["1", "3"])
def test_messages_by_tag_and_source(connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TCP_CONNECTIONS", connections)

    def member(comm: Communicator) -> None:
        lengths = (0, 5, 1000, 2000, 700001)
        others = [other for other in range(comm.size) if other != comm.rank]
        works = []
        for other, (tag, length) in itertools.product(others, enumerate(lengths)):
            x = np.full(length, comm.rank * 10 + tag, np.int64)
            works.append(start(comm, "send", x, None, root=other, tag=tag))
        for tag, other in itertools.product((4, 0, 3, 1, 2), others):
            out = room(lengths[tag], "int64")
            run(comm, "recv", None, out, root=other, tag=tag)
            assert (out == other * 10 + tag).all()
        for work in works:
            work.wait()

    run_threads(member, 3)


def test_messages_of_any_source_and_tag_come_in_their_senders_order() -> None:
    def member(comm: Communicator) -> None:
        if comm.rank:
            for index in range(150):  # more than may be under way unaccepted
                value = np.array([comm.rank, index])
                run(comm, "send", value, None, root=0, tag=index % 3)
            return
        seen: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(300):
            rank, index = run(comm, "recv", None, room(2, "int64"), root=ANY, tag=ANY)
            seen[int(rank)].append(int(index))
        assert seen == {1: list(range(150)), 2: list(range(150))}

    run_threads(member, 3)


def test_messages_to_oneself() -> None:
    def member(comm: Communicator) -> None:
        for length in (3, 100000):
            x = np.full(length, comm.rank + 5.0)
            first = start(comm, "send", x, None, root=comm.rank, tag=1)
            assert (run(comm, "recv", None, room(length, "float64"), root=ANY, tag=1) == x).all()
            first.wait()
            later = start(comm, "recv", None, room(length, "float64"), root=comm.rank, tag=2)
            run(comm, "send", x, None, root=comm.rank, tag=2)
            assert (later.wait() == x).all()

    run_threads(member, 2)


def test_messages_that_do_not_fit_are_a_mismatch_of_both_calls() -> None:
    def member(comm: Communicator) -> None:
        if comm.rank == 0:
            run(comm, "send", np.ones(4), None, root=1, tag=7)
            run(comm, "barrier", np.ones(0), None, dtype="none")
        else:
            run(comm, "recv", None, room(5, "float64"), root=0, tag=7)

    for outcome in settle_threads(member, 2):
        assert isinstance(outcome, MismatchError), outcome
        assert "a message differs: " in str(outcome)
        assert "send(float64[4], dest=1, tag=7) at " in str(outcome)
        assert "recv(float64[5], source=0, tag=7) at " in str(outcome)


def test_exchanges_that_do_not_fit_touch_no_output() -> None:
    outs = [room(90000) for _ in range(3)]

    def member(comm: Communicator) -> None:
        mine = (10000, 10000, 20000 if comm.rank == 0 else 10000)
        run(
            comm,
            *("all_to_all", room(sum(mine)) + 1, outs[comm.rank][:30000]),
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
                work = start(comm, "all_reduce", x, room(length), op="sum")
            else:
                share = length // comm.size
                x = x[: share * comm.size]
                work = start(comm, "reduce_scatter", x, room(share), op="sum", count=share)
            works.append((work, expected))
            to = (comm.rank + 1) % comm.size
            start(comm, "send", np.full(3000, index), None, root=to, tag=index)
            before = (comm.rank - 1) % comm.size
            work = start(comm, "recv", None, room(3000, "int64"), root=before, tag=index)
            works.append((work, index))
        for position in np.random.default_rng(comm.rank).permutation(len(works)):
            work, expected = works[position]
            assert (work.wait() == expected).all()

    run_threads(member, 3, timeout=60)


@pytest.mark.parametrize("connections", ["1", "4"])
def test_arrays_larger_than_any_buffer(connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TCP_CONNECTIONS", connections)
    length = 12_000_001

    def member(comm: Communicator) -> None:
        x = np.arange(length, dtype=np.int32) + comm.rank
        run(comm, "all_reduce", x, x, op="sum")
        total = sum(range(comm.size))
        np.testing.assert_array_equal(x, np.arange(length, dtype=np.int32) * comm.size + total)
        share = room(length // comm.size, "int32")
        run(comm, "reduce_scatter", x[: share.size * comm.size], share, op="max", count=share.size)
        np.testing.assert_array_equal(share, x[comm.rank * share.size :][: share.size])

    run_threads(member, 3)


def test_a_type_without_a_kernel_is_refused() -> None:
    def member(comm: Communicator) -> None:
        run(comm, "all_reduce", np.ones(3), room(3, "float64"), op="bitwise_and")

    for outcome in settle_threads(member, 2):
        assert isinstance(outcome, UnsupportedError)
        assert "all_reduce with operator bitwise_and does not carry float64" in str(outcome)


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (Call("barrier", None, "none", 0, None, "g"), "small"),
        (Call("all_reduce", "sum", "float32", 1024, None, "g"), "small"),
        (Call("all_reduce", "sum", "float32", 1025, None, "g"), "direct"),
        (Call("all_reduce", "sum", "float32", 1 << 20, None, "g"), "chain"),
        (Call("all_reduce", "sum", "bfloat16", 1 << 20, None, "g"), "direct"),
        (Call("all_reduce", "mean", "complex128", 1 << 20, None, "g"), "direct"),
        (Call("all_gather", None, "int8", 9, None, "g", (1, 8192)), "direct"),
        (Call("all_to_all", None, "int8", 3, None, "g", (1, 2), (2, 1)), "direct"),
    ],
)
def test_paths(call: Call, path: str) -> None:
    assert tcp_calls.choose(call, 2, Table().choices("tcp", 2)).algorithm == path


@pytest.mark.parametrize(
    "call",
    [
        Call("broadcast", None, "bool", 3, 1, "g"),
        Call("reduce_scatter", "sum", "float32", 7, None, "g", (3, 4)),
        Call("all_to_all", None, "float32", 0, None, "g", (2, 3), (4, 1)),
        Call("recv", None, "float32", 5, -1, "g", tag=-1),
    ],
)
def test_signatures_tell_the_call(call: Call) -> None:
    told = tcp_calls.annotated(tcp_calls.encode(call, "here"), b"a note")
    assert tcp_calls.decode(told, "g") == call
    assert tcp_calls.note_of(told) == b"a note"
