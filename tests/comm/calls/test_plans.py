"""Plans agree with the calls: algorithm, steps, and bytes moved."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.calls.call import PATHS, Call
from allreduce.comm.calls.plan import Plan
from allreduce.comm.selection.choosing import choices_for
from allreduce.comm.selection.table import Row
from allreduce.comm.transports.mpi.converted import plan_mpi
from allreduce.comm.transports.tcp.plan import plan_tcp
from allreduce.errors import UnsupportedError, UsageError
from tests.comm.ranks.tables import before_the_table
from tests.harness import run_threads

COLLECTIVES = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter", "broadcast"),
    "all_to_all",
)
KIB = 1 << 10
# Nothing, small, the last small one and the first that is not, a chunk and a bit, many chunks.
LENGTHS = (0, 3, 1024, 1025, 70001, 300007)
# Every kind of row on the way of every collective, so that nothing is taken from elsewhere.
ROWS = (
    Row("shared", COLLECTIVES, "eager", bytes=(0, 2 * KIB)),
    Row(
        *("shared", ("all_gather", "all_reduce"), "direct"),
        bytes=(300 * KIB, None),
        chunk=64 * KIB,
        past=1000 * KIB,
    ),
    Row(
        *("shared", ("gather", "scatter", "broadcast"), "cross_process"),
        bytes=(10 * KIB, 500 * KIB),
        chunk=32 * KIB,
        past=90 * KIB,
    ),
    Row(
        *("shared", COLLECTIVES, "staged"),
        bytes=(2 * KIB + 1, 100 * KIB),
        chunk=16 * KIB,
        stores="streaming",
        past=3 * KIB,
    ),
    Row(
        *("shared", ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"), "pairwise"),
        members=(2, 2),
        bytes=(200 * KIB, 290 * KIB),
        chunk=8 * KIB,
        past=150 * KIB,
    ),
    Row("shared", ("all_reduce", "reduce"), "staged", chunk=128 * KIB, stores="streaming"),
    Row(
        *("shared", COLLECTIVES, "staged"), crowded=True, chunk=32 * KIB, stores="ordinary", past=1
    ),
    Row("tcp", COLLECTIVES, "eager", bytes=(0, 1 * KIB)),
    Row("tcp", ("all_reduce", "reduce"), "chain", bytes=(1 * KIB + 1, None), chunk=16 * KIB),
)


ROOTED = ("reduce", "gather", "scatter", "broadcast")
CUT = ("reduce_scatter", "scatter", "all_to_all")


def compare(comm: Communicator, symmetric: bool) -> list[str]:
    """Make all calls, and say where the plan was wrong."""
    wrong = []
    for collective, length in itertools.product(COLLECTIVES, LENGTHS):
        rows = length * comm.size if collective in CUT else length
        x = comm.empty(rows) if symmetric else np.empty(rows, "float32")
        out = comm.empty(rows) if symmetric and collective == "all_reduce" else None
        if collective == "scatter":
            out = np.empty(length, "float32")
        x[:] = 1
        given: dict[str, Any] = {"root": comm.size - 1} if collective in ROOTED else {}
        planned = comm.plan(collective, x, out=out, **given)
        mine = passed(comm, collective, x, given)
        work = getattr(comm, collective)(mine, out=out, async_op=True, **given)
        work.wait()
        wrong += differences(comm, planned, work)
    return wrong


def differences(comm: Communicator, planned: Plan, work: Any) -> list[str]:
    native = work.native
    if comm.transport == "tcp":
        happened: tuple[Any, ...] = (PATHS[native.path],)
        expected: tuple[Any, ...] = (planned.algorithm,)
    else:
        path, chunk, streaming, _ = native.way
        happened = (PATHS[path], chunk, "streaming" if streaming else "ordinary")
        expected = (planned.algorithm, planned.chunk, planned.stores)
    return [] if happened == expected else [f"{comm.rank}: {planned}\n {happened}"]


@pytest.mark.parametrize("rows", [(), ROWS], ids=["built-in", "others"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("symmetric", [False, True])
def test_shared_plans_come_true(size: int, symmetric: bool, rows: tuple[Row, ...]) -> None:
    with before_the_table(*rows):
        for wrong in run_threads(lambda comm: compare(comm, symmetric), size):
            assert not wrong


def passed(comm: Communicator, collective: str, x: Any, given: dict[str, Any]) -> Any:
    """Return what this member passes to a call: nothing to a scatter by another."""
    return x if collective != "scatter" or comm.rank == given["root"] else None


def sent(comm: Communicator) -> int:
    """Return the bytes of data that have gone through this member's sockets."""
    transport: Any = comm._dispatch.transport
    if comm.transport == "tcp":
        return sum(transport._member.payload_bytes())
    levels = [level.transport for level in transport._levels.values()]
    over_tcp = [transport._control, *(one for one in levels if one.name == "tcp")]
    return sum(sum(one._member.payload_bytes()) for one in over_tcp)


def sends(comm: Communicator) -> list[str]:
    """Make all calls, and say where they sent more or less through sockets than planned."""
    wrong = []
    for collective, length in itertools.product(COLLECTIVES, LENGTHS):
        x = np.ones(length * comm.size if collective in CUT else length, "float32")
        given: dict[str, Any] = {"root": comm.size - 1} if collective in ROOTED else {}
        if collective == "scatter":
            given["out"] = np.empty(length, "float32")
        planned = comm.plan(collective, x, **given)
        comm.barrier()
        before = sent(comm)
        work = getattr(comm, collective)(passed(comm, collective, x, given), async_op=True, **given)
        work.wait()
        comm.barrier()
        if comm.transport == "tcp":
            wrong += differences(comm, planned, work)
        if sent(comm) - before != planned.sent:
            wrong.append(f"{comm.rank}: {planned}\n sent {sent(comm) - before}")
    return wrong


@pytest.mark.parametrize("rows", [(), ROWS], ids=["built-in", "others"])
@pytest.mark.parametrize("size", [2, 3])
def test_tcp_plans_come_true(
    size: int, rows: tuple[Row, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")
    with before_the_table(*rows):
        for wrong in run_threads(sends, size):
            assert not wrong


def test_messages_over_tcp_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")

    def talk(comm: Communicator) -> list[tuple[str, int | None]]:
        plans = []
        for length in (4, 100000):
            x = np.ones(length)
            if comm.rank == 0:
                plans.append(comm.plan("send", x, dest=1))
                before = sent(comm)
                comm.send(x, dest=1)
                comm.barrier()
                assert sent(comm) - before == plans[-1].sent == 8 * length
            else:
                plans.append(comm.plan("recv", x, source=0))
                comm.recv(x, source=0)
                comm.barrier()
        return [(one.algorithm, one.sent) for one in plans]

    assert run_threads(talk, 2) == [
        [("eager", 32), ("direct", 800000)],
        [("eager", 0), ("direct", 0)],
    ]


def test_unequal_shares_are_planned() -> None:
    def ask(comm: Communicator) -> list[str]:
        counts = [70000, 5, 0][: comm.size]
        mine = counts[comm.rank]
        wrong = []
        calls: tuple[tuple[str, Any, dict[str, Any]], ...] = (
            ("all_gather", np.ones(mine), {}),
            ("gather", np.ones(mine), {"root": 1}),
            ("reduce_scatter", np.ones(sum(counts)), {}),
            ("scatter", np.ones(sum(counts)), {"root": 0, "out": np.empty(mine)}),
        )
        for name, x, extra in calls:
            planned = comm.plan(name, x, counts=counts, **extra)
            given = passed(comm, name, x, extra)
            work = getattr(comm, name)(given, counts=counts, async_op=True, **extra)
            work.wait()
            wrong += differences(comm, planned, work)
        x, receives = np.ones(sum(counts)), [mine] * comm.size
        planned = comm.plan("all_to_all", x, counts=counts, receives=receives)
        works: list[Any] = []
        start: Any = comm._dispatch.transport.start

        def spy(*arguments: Any) -> Any:
            works.append(start(*arguments))
            return works[-1]

        comm._dispatch.transport.start = spy  # type: ignore[assignment, method-assign]
        comm.all_to_all(x, counts=counts)
        assert len(works) == 2  # the counts go first
        return wrong + differences(comm, planned, works[1])

    for wrong in run_threads(ask, 3):
        assert not wrong


def test_a_plan_says_what_would_run() -> None:
    call = Call("all_reduce", "sum", "float32", 1 << 20, None, "g")
    text = str(plan_tcp(call, 1, 3, choices_for("tcp", 3)))
    assert text.startswith(
        "all_reduce(float32[1048576], op='sum'): chain through tcp, at most 256 KiB at a time"
    )
    assert "receive 1.333 MiB in 6 chunks from rank 0, reduce them with the own" in text
    assert "sends 5.333 MiB" in text
    text = str(plan_mpi(call, 3))
    assert "MPI decides" in text
    assert "sends" not in text


def test_a_plan_over_mpi_says_what_is_converted() -> None:
    def planned(collective: str, op: str, dtype: str, count: int) -> Plan:
        call = Call(collective, op, dtype, count, None, "g")
        return plan_mpi(call, 3)

    large = planned("all_reduce", "sum", "float16", 5 << 20)
    assert (large.chunk, large.staging) == (8 << 20, 8 << 20)
    assert "convert float16 to float32, which MPI reduces, in 3 pieces" in str(large)
    small = planned("reduce_scatter", "sum", "bfloat16", 1 << 10)  # for all members at once
    assert (small.chunk, small.staging) == (0, 12 << 10)
    assert "in one piece: 12 KiB in all" in str(small)
    assert planned("all_reduce", "logical_or", "uint8", 7).staging == 7
    for dtype in ("float32", "int8"):
        assert "convert" not in str(planned("all_reduce", "sum", dtype, 5 << 20))


def test_a_plan_is_refused_as_its_call_would_be() -> None:
    def ask(comm: Communicator) -> None:
        with pytest.raises(
            UsageError, match=r"^\[shared\] replica . \(rank 0\): .* did you mean 'all_reduce'"
        ):
            comm.plan("allreduce", np.ones(3))
        with pytest.raises(UsageError, match="broadcast takes no op, but got op='sum'"):
            comm.plan("broadcast", np.ones(3), op="sum")
        with pytest.raises(UsageError, match="takes no tag, but got tag=3"):
            comm.plan("all_reduce", np.ones(3), tag=3)
        with pytest.raises(UsageError, match="got tag=-7; expected a whole number from 0"):
            comm.plan("send", np.ones(3), dest=0, tag=-7)
        with pytest.raises(UnsupportedError, match="does not scale int64"):
            comm.plan("all_reduce", np.ones(3, int), prescale=2)
        with pytest.raises(UsageError, match="item 1 of out is read-only; pass a writable"):
            comm.plan("all_reduce", [np.ones(3)] * 2, out=[np.ones(3), np.broadcast_to(1.0, 3)])
        with pytest.raises(UsageError, match="cuts axis 0 into 2 equal shares"):
            comm.plan("scatter", np.ones(3))
        with pytest.raises(UsageError, match="takes receives, too"):
            comm.plan("all_to_all", np.ones(3), counts=[1, 2])
        with pytest.raises(UsageError, match="root=7"):
            comm.plan("reduce", np.ones(3), root=7)

    run_threads(ask, 2)


def test_factors_are_planned_as_they_are_called() -> None:
    def ask(comm: Communicator) -> None:
        x = np.ones(50000)
        scaled = comm.plan("all_reduce", x, prescale=0.5, postscale=3, out=x)
        assert str(scaled).startswith(
            "all_reduce(float64[50000], op='sum', prescale=0.5, postscale=3.0): staged"
        )
        assert scaled.steps[0] == "multiply the input by 0.5"
        assert scaled.steps[-1] == "multiply the result by 3"
        assert len(scaled.steps) == 2

    run_threads(ask, 2)


def test_lists_are_planned_with_their_outputs() -> None:
    def ask(comm: Communicator) -> None:
        a, b, whole = np.ones(1000), np.ones((2, 9), "i4"), comm.empty(70000, "f8")
        one = comm.plan("all_reduce", [whole], out=[whole])
        assert one.parts[0].algorithm == "direct"  # only where it lies
        assert one.steps == ("make a call of each array",)
        assert comm.plan("all_reduce", [a, b]).steps == one.steps
        assert comm.plan("all_reduce", [a, b], out=[a, b]).steps == one.steps
        several = comm.plan("broadcast", [a, b, whole, a], root=1, out=[a, b, whole, a + 1])
        assert several.steps[0].startswith("pack")
        assert [part.call for part in several.parts] == [
            "broadcast(float64[2000], root=1)",
            "broadcast(int32[2, 9], root=1)",
            "broadcast(float64[70000], root=1)",
        ]
        nothing = comm.plan("all_reduce", [])
        assert [part.call for part in nothing.parts] == ["barrier()"]

    run_threads(ask, 2)
