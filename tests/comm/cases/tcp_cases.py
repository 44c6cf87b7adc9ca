"""Calls as a transport gets them, and the expected results of the tcp transport."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.comm.calls.call import Array, Call
from allreduce.comm.core.work import Work
from tests.comm.cases.collective_cases import whole

SIZES = (1, 2, 3, 5)
ANY = -1


def start(
    comm: Communicator, collective: str, x: Array | None, out: Array | None, **facts: Any
) -> Work:
    """Start a call on the transport itself; `count` is that of `x` unless given."""
    some = x if x is not None else out
    assert some is not None
    names = {"op": None, "dtype": str(some.dtype), "count": some.size, "root": None}
    call = Call(collective, group="test", **{**names, **facts})
    return comm._dispatch.transport.start(call, x, out, lambda: out)


def run(
    comm: Communicator, collective: str, x: Array | None, out: Array | None, **facts: Any
) -> Any:
    return start(comm, collective, x, out, **facts).wait()


def new_output(length: int, dtype: str = "float32") -> Array:
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
        run(comm, "all_reduce", mine, new_output(length, dtype), op=op), expected
    )
    for root in {0, comm.size - 1}:
        out = new_output(length, dtype) if comm.rank == root else None
        result = run(comm, "reduce", mine, out, op=op, root=root)
        if out is not None:
            np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(mine, inputs[comm.rank])
    x = mine.copy()
    np.testing.assert_array_equal(run(comm, "all_reduce", x, x, op=op), expected)


def scattering(comm: Communicator, counts: list[int], listed: tuple[int, ...] | None) -> None:
    inputs = [whole(sum(counts), "float32", member) for member in range(comm.size)]
    expected = shares(counts, np.add.reduce(inputs))[comm.rank]
    out = new_output(counts[comm.rank])
    facts = {"count": sum(counts) if listed else counts[0], "counts": listed}
    run(comm, "reduce_scatter", inputs[comm.rank], out, op="sum", **facts)
    np.testing.assert_array_equal(out, expected)
    for root in {0, comm.size - 1}:
        x = inputs[root] if comm.rank == root else None
        out = new_output(counts[comm.rank])
        run(comm, "scatter", x, out, root=root, **facts)
        np.testing.assert_array_equal(out, shares(counts, inputs[root])[comm.rank])


def gathering(comm: Communicator, counts: list[int], listed: tuple[int, ...] | None) -> None:
    inputs = [whole(count, "int64", member) for member, count in enumerate(counts)]
    facts = {"count": sum(counts) if listed else counts[0], "counts": listed}
    out = new_output(sum(counts), "int64")
    run(comm, "all_gather", inputs[comm.rank], out, **facts)
    np.testing.assert_array_equal(out, np.concatenate(inputs))
    out[:] = 0
    own = shares(counts, out)[comm.rank]
    own[:] = inputs[comm.rank]
    run(comm, "all_gather", own, out, **facts)  # in place
    np.testing.assert_array_equal(out, np.concatenate(inputs))
    for root in {0, comm.size - 1}:
        target = new_output(sum(counts), "int64") if comm.rank == root else None
        run(comm, "gather", inputs[comm.rank], target, root=root, **facts)
        if target is not None:
            np.testing.assert_array_equal(target, np.concatenate(inputs))


def spreading(comm: Communicator, length: int) -> None:
    for root in {0, comm.size - 1}:
        out = new_output(length)
        x = whole(length, "float32", root) if comm.rank == root else out
        run(comm, "broadcast", x, out, root=root)
        np.testing.assert_array_equal(out, whole(length, "float32", root))


def exchanging(comm: Communicator, length: int) -> None:
    inputs = [whole(length * comm.size, "float32", member) for member in range(comm.size)]
    out = new_output(length * comm.size)
    run(comm, "all_to_all", inputs[comm.rank], out, count=length)
    parts = [array[comm.rank * length :][:length] for array in inputs]
    np.testing.assert_array_equal(out, np.concatenate(parts))


def exchanging_different(comm: Communicator, scale: int) -> None:
    sends = [[(a * 3 + b * 5) % 7 * scale for b in range(comm.size)] for a in range(comm.size)]
    inputs = [whole(sum(counts), "float32", a) for a, counts in enumerate(sends)]
    receives = [sends[a][comm.rank] for a in range(comm.size)]
    out = new_output(sum(receives))
    mine = sends[comm.rank]
    facts = {"count": sum(mine), "counts": tuple(mine), "receives": tuple(receives)}
    run(comm, "all_to_all", inputs[comm.rank], out, **facts)
    parts = [shares(counts, array)[comm.rank] for counts, array in zip(sends, inputs, strict=True)]
    np.testing.assert_array_equal(out, np.concatenate(parts))
