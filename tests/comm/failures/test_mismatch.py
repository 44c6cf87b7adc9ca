"""Members that make different calls: errors on all name both calls, and no output is touched."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator, adopt, total
from allreduce.comm.calls.call import Call
from allreduce.comm.calls.call_site import Note
from allreduce.comm.failures.mismatch import Side, describe
from tests.harness import settle_threads

SOON_SECONDS = 25  # on a busy machine, and long before the communicator's timeout


def raised(
    fn: Callable[[Communicator], Any], size: int, kind: type[BaseException], **options: Any
) -> list[str]:
    """Run `fn` in threads; every member must raise `kind`. Returns the messages."""
    outcomes = settle_threads(fn, size, **options)
    for outcome in outcomes:
        assert isinstance(outcome, kind), outcomes
    return [str(outcome) for outcome in outcomes]


def _operators(comm: Communicator, odd: bool, out: Any) -> None:
    comm.all_reduce(np.ones(9), op="max" if odd else "sum", out=out)


def _types(comm: Communicator, odd: bool, out: Any) -> None:
    dtype = "int64" if odd else "float64"
    comm.all_reduce(np.ones(9, dtype), out=out.view(dtype))


def _counts(comm: Communicator, odd: bool, out: Any) -> None:
    count = 8 if odd else 9
    comm.all_reduce(np.ones(count), out=out[:count])


def _shapes(comm: Communicator, odd: bool, out: Any) -> None:
    shape = (9, 1) if odd else (3, 3)
    comm.all_reduce(np.ones(shape), out=out.reshape(shape))


def _roots(comm: Communicator, odd: bool, out: Any) -> None:
    comm.broadcast(np.ones(9), root=int(odd), out=out)


def _collectives(comm: Communicator, odd: bool, out: Any) -> None:
    if odd:
        comm.barrier()
    else:
        comm.broadcast(np.ones(9), out=out)


def _long_counts(comm: Communicator, odd: bool, out: Any) -> None:
    big = np.full(500000, 5.0)
    try:
        comm.all_reduce(np.ones(400000 if odd else 500000), out=big[: 400000 if odd else 500000])
    finally:
        out[:] = big[:9]


def _lists(comm: Communicator, odd: bool, out: Any) -> None:
    items, outs = [np.ones(8), np.ones(4)], [out[:8], np.ones(4)]
    comm.all_reduce(items[::-1] if odd else items, out=outs[::-1] if odd else outs)


def _no_items(comm: Communicator, odd: bool, out: Any) -> None:
    comm.all_reduce([] if odd else [np.ones(9)], out=[] if odd else [out])


def _factors(comm: Communicator, odd: bool, out: Any) -> None:
    comm.all_reduce(np.ones(9), prescale=3 if odd else 2, postscale=np.float64(1), out=out)


def _one_factor(comm: Communicator, odd: bool, out: Any) -> None:
    comm.all_reduce(np.ones(9), postscale=0.5 if odd else 1, out=out)


def _objects(comm: Communicator, odd: bool, _out: Any) -> None:
    if odd:
        comm.all_gather_object(1)
    else:
        comm.all_gather(np.ones(1, "int64"))


def _listed(comm: Communicator, odd: bool, out: Any) -> None:
    counts = [4, 2, 3] if odd else [3, 3, 3]
    x = np.ones((counts[comm.rank], 2), np.float32)
    comm.all_gather(x, counts=counts, out=out.view(np.float32).reshape(9, 2))


def _exchanges(comm: Communicator, odd: bool, out: Any) -> None:
    comm.all_to_all(np.ones(9), counts=[3, 3, 3] if odd else None, out=out)


def _purposes(comm: Communicator, odd: bool, out: Any) -> None:
    total(comm, "a mean" if odd else "a sum", np.ones(9))


def _adoptions(comm: Communicator, odd: bool, out: Any) -> None:
    adopt(comm, "the first value of b" if odd else "the first value of a", out)


def _scatters(comm: Communicator, odd: bool, out: Any) -> None:
    comm.scatter(np.ones(9) if comm.rank == int(odd) else None, root=int(odd))


def _scatters_into(comm: Communicator, odd: bool, out: Any) -> None:
    into = None if odd else out[:3]
    comm.scatter(np.ones(9) if odd else None, root=2, out=into)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            _lists,
            (
                "all_reduce([float64[8], float64[4]], op='sum')",
                "all_reduce([float64[4], float64[8]], op='sum')",
            ),
        ),
        (_no_items, ("all_reduce([float64[9]], op='sum')", "all_reduce([], op='sum')")),
        (
            _factors,
            (
                "all_reduce(float64[9], op='sum', prescale=2.0)",
                "all_reduce(float64[9], op='sum', prescale=3.0)",
            ),
        ),
        (
            _one_factor,
            (
                "all_reduce(float64[9], op='sum')",
                "all_reduce(float64[9], op='sum', postscale=0.5)",
            ),
        ),
        (_objects, ("all_gather(int64[1])", "all_gather_object()")),
        (
            _listed,
            (
                "all_gather(float32[3, 2], counts=[3, 3, 3])",
                "all_gather(float32[3, 2], counts=[4, 2, 3])",
            ),
        ),
        (_exchanges, ("all_to_all(float64[9])", "all_to_all(..., counts=[...])")),
        (_purposes, ("total(a sum)", "total(a mean)")),
        (_adoptions, ("adopt(the first value of a)", "adopt(the first value of b)")),
        (_scatters, ("scatter(root=0)", "scatter(root=1)")),
        (_scatters_into, ("scatter(float64[3], root=2)", "scatter(root=2)")),
        (_operators, ("all_reduce(float64[9], op='sum')", "all_reduce(float64[9], op='max')")),
        (_types, ("all_reduce(float64[9], op='sum')", "all_reduce(int64[9], op='sum')")),
        (_counts, ("all_reduce(float64[9], op='sum')", "all_reduce(float64[8], op='sum')")),
        (_shapes, ("all_reduce(float64[3, 3], op='sum')", "all_reduce(float64[9, 1], op='sum')")),
        (_roots, ("broadcast(float64[9], root=0)", "broadcast(float64[9], root=1)")),
        (_collectives, ("broadcast(float64[9], root=0)", "barrier()")),
        (
            _long_counts,
            ("all_reduce(float64[500000], op='sum')", "all_reduce(float64[400000], op='sum')"),
        ),
    ],
)
def test_members_that_disagree_all_say_so_and_no_output_is_touched(
    call: Any, says: tuple[str, str]
) -> None:
    outs = [np.full(9, 5.0) for _ in range(3)]

    def member(comm: Communicator) -> None:
        comm.barrier()
        began = time.monotonic()
        try:
            call(comm, comm.rank == 2, outs[comm.rank])
        finally:
            assert time.monotonic() - began < SOON_SECONDS

    messages = raised(member, 3, errors.MismatchError, timeout=90, comm_timeout=60)
    site = rf" at {_line(call)} "
    pairs = set()
    for index, text in enumerate(messages):
        text = re.sub(r"replica (\d) \(rank 0\)", r"rank \1", text)
        found = re.fullmatch(
            rf"\[\w+\] rank {index}: call #1 differs: (.+?){site}(here|on rank \d), but "
            rf"(.+?){site}on rank (\d); .* (equal|same) .*",
            text,
        )
        assert found, text
        first, where, second, other, _ = found.groups()
        sides = {index if where == "here" else int(where[-1]): first, int(other): second}
        assert (sides[min(sides)], sides[2]) == says
        assert where == "here" or index not in sides  # one's own call comes first
        pairs.add(min(sides))
    assert len(pairs) == 1  # the same text on all members
    assert all((out == 5.0).all() for out in outs)


def test_what_differs_in_empty_is_its_shape_or_type() -> None:
    call_text = ("empty((8,), dtype='float32')", "empty((9,), dtype='float32')")
    sides = [
        Side(
            f"rank {rank}",
            Call("barrier", None, "none", 0, None, "world", call_text=text),
            Note("", ""),
        )
        for rank, text in enumerate(call_text)
    ]
    assert describe("call #1", sides[0], sides[1]).endswith(
        "; shapes and types must be equal on all ranks"
    )


def _line(call: Any) -> str:
    """Return a pattern of the site of a function's lines."""
    file = os.path.relpath(call.__code__.co_filename)
    lines = {str(line) for _, _, line in call.__code__.co_lines()}
    return f"{re.escape(file)}:(?:{'|'.join(lines)})"


def test_each_side_of_a_disagreement_has_its_own_line() -> None:
    def member(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(np.ones(3), op="max")
        else:
            work = comm.all_reduce(np.ones(3), async_op=True)
            time.sleep(0.2)
            work.wait()

    messages = raised(member, 2, errors.MismatchError)
    first = member.__code__.co_firstlineno
    for message, own, other in ((messages[0], 2, 4), (messages[1], 4, 2)):
        assert re.search(rf"test_mismatch.py:{first + own} here, but .*", message), message
        assert f"test_mismatch.py:{first + other} on replica" in message


def test_a_member_that_does_not_wait_for_its_call_is_named_with_its_line() -> None:
    told = threading.Event()

    def member(comm: Communicator) -> None:
        work = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        if comm.rank == 1:
            assert told.wait(25)
        try:
            work.wait()
        finally:
            told.set()

    line = member.__code__.co_firstlineno + 1
    for message in raised(member, 2, errors.MismatchError):
        assert message.count(f"test_mismatch.py:{line} ") == 2


@pytest.mark.parametrize("length", [0, 1, 29])
def test_lists_of_different_lengths_are_told_by_how_many_arrays_they_have(length: int) -> None:
    def member(comm: Communicator) -> None:
        comm.all_reduce([np.ones(4)] * (length + comm.rank))

    numbers = f"(replica 0 (rank 0): {length}, replica 1 (rank 0): {length + 1})"
    for message in raised(member, 2, errors.MismatchError):
        assert message.endswith(
            f"; lists must have the same number of arrays on all ranks {numbers}"
        )


def test_lists_of_different_arrays_are_told_by_shapes_and_types() -> None:
    def member(comm: Communicator) -> None:
        comm.all_reduce([np.ones(4, "f"), np.ones(4, "f" if comm.rank else "i")])

    for message in raised(member, 2, errors.MismatchError):
        assert "; each array's shape and type, and the factors, must be equal on all" in message
        assert "(item 1 is " in message


@pytest.mark.parametrize(("transport", "odd"), [("shared", 0), ("tcp", 78), ("hierarchical", 100)])
def test_of_a_long_list_the_first_array_that_differs_is_told(
    transport: str, odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)

    def member(comm: Communicator) -> None:
        sizes = [4] * 101
        sizes[odd] += comm.rank
        comm.all_reduce([np.ones(size, "f") for size in sizes], op="max")

    for rank, message in enumerate(raised(member, 2, errors.MismatchError)):
        assert message.count("... 101 arrays], op='max') at") == 2
        sides = ["float32[4]", "float32[5]"]
        other = f"replica {1 - rank} (rank 0)"
        assert message.endswith(
            f"(item {odd} is {sides[rank]} here and {sides[1 - rank]} on {other})"
        )


@pytest.mark.parametrize("length", [1, 101])
def test_lists_that_differ_in_a_factor_alone_show_both(length: int) -> None:
    def member(comm: Communicator) -> None:
        comm.all_reduce([np.ones(4, "f")] * length, prescale=1 / (2 + comm.rank))

    for message in raised(member, 2, errors.MismatchError):
        assert "prescale=0.5)" in message
        assert f"prescale={1 / 3}" in message
        assert message.endswith("and the factors, must be equal on all ranks")


def test_symmetric_memory_on_some_members_only_is_a_mismatch() -> None:
    def member(comm: Communicator) -> None:
        mine = comm.empty((5000,), "float32")
        x = mine if comm.rank else np.ones(5000, "float32")
        comm.all_reduce(x, out=x)

    for message in raised(member, 2, errors.MismatchError):
        assert message.count("all_reduce(float32[5000], op='sum')") == 2
        assert message.endswith(
            "replica 1 (rank 0) passes arrays of comm.empty, but replica 0 (rank 0) ordinary "
            "ones: pass arrays of comm.empty on every rank, or on none"
        )


def test_a_mismatch_does_not_wait_for_a_straggler() -> None:
    told = threading.Barrier(3, timeout=25)

    def member(comm: Communicator) -> None:
        if comm.rank == 0:
            told.wait()
        with pytest.raises(errors.MismatchError):
            comm.all_reduce(np.ones(3 + comm.rank))
        if comm.rank:
            told.wait()

    assert settle_threads(member, 3) == [None] * 3
