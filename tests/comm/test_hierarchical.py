"""The hierarchical transport: what holds for any, on members laid out as if on several hosts."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import ANY, Communicator, native
from allreduce.comm.hierarchical import opener as hierarchical_opener
from tests import netns
from tests.comm.pool import ProcessPool, Runner, in_threads, placed
from tests.comm.test_plans import sends
from tests.comm.test_tcp import Contract
from tests.harness import run_ranks, run_threads, settle_threads

Lay = Callable[[str], None]


@pytest.fixture
def lay(monkeypatch: pytest.MonkeyPatch) -> Lay:
    """Have communicators be hierarchical, of members on hosts that are named by letters."""
    opened = hierarchical_opener.open_hierarchical

    def lay(hosts: str) -> None:
        monkeypatch.setenv("ALLREDUCE_TRANSPORT", "hierarchical")
        laid = partial(opened, hosts=hosts.__getitem__)
        monkeypatch.setattr(hierarchical_opener, "open_hierarchical", laid)

    return lay


@pytest.fixture
def run(request: pytest.FixtureRequest, lay: Lay) -> Runner:
    lay(request.param)
    return in_threads(len(request.param))


@pytest.mark.parametrize("run", ["aab"], indirect=True)
class TestThreads(Contract):
    pass


@pytest.mark.torture
@pytest.mark.parametrize("run", ["a", "aa", "ab", "abab", "abba", "aabb", "aaabb"], indirect=True)
class TestAnyLayout(Contract):
    pass


@pytest.fixture(scope="module")
def four() -> Iterator[list[netns.Host]]:
    with netns.hosts(4) as made:
        yield made


@pytest.fixture(scope="module")
def namespaces(four: list[netns.Host]) -> Iterator[ProcessPool]:
    """Two ranks on each of four hosts, which find out by themselves that they are four."""
    ranks = [(own, host.command()) for host, own in netns.explicit_ranks(four, 2)]
    pool = ProcessPool(8, None, ranks)
    yield pool
    assert pool.close() == [0] * 8


def test_what_crosses_between_hosts_is_what_the_plan_says(namespaces: ProcessPool) -> None:
    seen = namespaces.run("crossings")
    for rank, calls in enumerate(seen):
        for name, planned, crossed in calls:
            assert planned == crossed, (rank, name)
    everywhere = {name: sum(calls[i][1] for calls in seen) for i, (name, *_) in enumerate(seen[0])}
    # Of 4 hosts, each has to send what it has reduced and to get what the others have: a ring's
    # bytes, once for each host and not for each rank.
    assert everywhere["all_reduce 600000"] == 2 * (4 - 1) * 600000 * 4
    assert everywhere["barrier"] == 0


def test_values_on_four_hosts(namespaces: ProcessPool) -> None:
    for case, *where in (
        ("in_flight",),
        ("prepared",),
        ("planned",),
        ("unequal", "private"),
        ("plain_data",),
        ("everybody_to_everybody", "private"),
        ("unequal_exchange", "private"),
        ("ring",),
        ("anybody",),
        ("crossing",),
        ("among_collectives",),
        ("by_parity",),
        ("per_host", "aabbccdd"),
    ):
        namespaces.run(case, *where)


@pytest.mark.torture
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["every_length", "every_pair", "rooted", "into_out"])
def test_four_hosts_at_length(namespaces: ProcessPool, case: str) -> None:
    namespaces.run(case, "private", timeout=500)


def test_hosts_are_told_apart_by_the_name_that_is_set() -> None:
    pool = ProcessPool(3, None, placed("aba"))
    assert pool.run("whereabouts") == [
        ["hierarchical", 0, 2],
        ["hierarchical", 0, 1],
        *([["hierarchical", 1, 2]]),
    ]
    pool.run("layouts")
    assert pool.close() == [0] * 3


def _types(comm: Communicator, odd: bool, out: Any) -> None:
    dtype = "int64" if odd else "float64"
    comm.all_reduce(np.ones(9, dtype), out=out.view(dtype))


def _counts(comm: Communicator, odd: bool, out: Any) -> None:
    big = np.full(2_000_000, 5.0)  # the first chunks of both are alike
    count = 1_500_000 if odd else 2_000_000
    try:
        comm.all_reduce(np.ones(count), out=big[:count])
    finally:
        out[:] = big[:9]


def _collectives(comm: Communicator, odd: bool, out: Any) -> None:
    if odd:
        comm.reduce(np.ones(9), root=comm.rank, out=out)
    else:
        comm.all_reduce(np.ones(9), out=out)


@pytest.mark.parametrize("call", [_types, _counts, _collectives])
@pytest.mark.parametrize("odd", [1, 2])  # beside rank 0 on its host; in its lane on the other
def test_members_that_disagree_are_both_named_and_no_output_is_touched(
    lay: Lay, call: Callable[[Communicator, bool, Any], None], odd: int
) -> None:
    lay("aabb")
    outs = [np.full(9, 5.0) for _ in range(4)]

    def disagree(comm: Communicator) -> None:
        call(comm, comm.rank == odd, outs[comm.rank])

    began = time.monotonic()
    outcomes = settle_threads(disagree, 4)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, errors.MismatchError), outcomes
        assert f"replica {odd} " in str(outcome)
        assert str(outcome).startswith(f"[hierarchical] replica {rank} (rank 0): ")
        assert (outs[rank] == 5.0).all()
    assert time.monotonic() - began < 3


def test_members_that_never_come_are_named_and_then_all_is_over(
    lay: Lay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lay("aabb")
    monkeypatch.setattr(native, "WARN_SECONDS", 0.2)
    over = threading.Event()

    def call(comm: Communicator) -> None:
        if comm.rank >= 2:
            over.wait(10)
            comm.barrier()
        work = comm.all_reduce(np.ones(100000), async_op=True)
        try:
            work.wait(0.3)
        finally:
            if comm.rank == 0:
                over.set()
            with pytest.raises(errors.ClosedError, match="dead since"):
                comm.barrier()

    outcomes = settle_threads(call, 4)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [errors.TimeoutError] * 4, outcomes
    said = [str(outcome) for outcome in outcomes]
    said += [record.getMessage() for record in caplog.records if "has waited" in record.msg]
    assert len(said) == 4 + 2
    for text in said:
        for missing in (2, 3):
            assert f"replica {missing} (rank 0) has made no call yet" in text, said
    assert all(" #0 after 0.3 s: " in text for text in said[:4]), said
    assert all(re.search(r" has waited 0.2\d* s in call #0: ", text) for text in said[4:]), said


def test_a_member_that_leaves_in_the_middle_is_named_by_all(lay: Lay) -> None:
    lay("aabb")

    def call(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 2:
            comm.close()
            return
        comm.all_reduce(np.ones(1000))

    outcomes = settle_threads(call, 4)
    assert outcomes[2] is None
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank], errors.PeerLostError), outcomes
        assert "replica 2 (rank 0) (process" in str(outcomes[rank])
        assert "left normally" in str(outcomes[rank])


def _stopped_rank(hosts: str, victim: int) -> None:
    import os
    import signal
    import threading

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init, world

    rank = int(os.environ["ALLREDUCE_RANK"])
    os.environ["ALLREDUCE_HOST"] = hosts[rank]
    comm = init(timeout=1.5)
    pids = comm.all_gather_object(os.getpid())
    if rank == victim:  # in the middle of it
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    works = [comm.all_reduce(np.ones(3_000_000, "f4"), async_op=True) for _ in range(9)]
    try:
        for work in works:
            work.wait()
    except errors.TimeoutError as error:
        print(str(error).split(": ", 1)[1])
    others = [other for other in range(len(hosts)) if other != victim]
    world().store.set(f"done/{rank}", b"")
    if rank == others[0]:  # then it may end
        try:
            for other in others:
                world().store.get(f"done/{other}", 20)
        finally:
            os.kill(pids[victim], signal.SIGKILL)


@pytest.mark.parametrize(
    ("hosts", "victim", "told"),
    [
        ("aaabcc", 4, "is stopped"),  # the others' mates wait for its lane
        pytest.param("aabcc", 2, "process ", marks=pytest.mark.torture),  # nobody sees it stand
        pytest.param("abab", 2, "is stopped", marks=pytest.mark.torture),
        pytest.param("aabcc", 1, "is stopped", marks=pytest.mark.torture),
    ],
)
def test_a_rank_that_is_stopped_in_the_middle_is_named_on_all_hosts(
    hosts: str, victim: int, told: str
) -> None:
    results = run_ranks(_stopped_rank, len(hosts), timeout=40, arguments=(hosts, victim))
    for rank, result in enumerate(results):
        if rank != victim:
            assert f"rank {victim} made its last call" in result.stdout, results
            assert told in result.stdout, results


def test_waiting_for_a_message_drives_what_was_started_before(lay: Lay) -> None:
    lay("abab")

    def call(comm: Communicator) -> float:
        total = comm.all_reduce(np.full(300_000, 1.0 + comm.rank), async_op=True)
        got = np.zeros(1)
        if comm.rank == 0:  # waits for what comes after the others' waits
            sources = []
            for _ in range(3):
                message = comm.recv(got, source=ANY, tag=7, async_op=True)
                message.wait()
                sources.append(message.source)
            assert sorted(sources) == [1, 2, 3]
        found: float = total.wait()[-1]
        if comm.rank:
            comm.send(np.ones(1), dest=0, tag=7)
        return found

    assert settle_threads(call, 4) == [10.0] * 4


def test_two_communicators_waited_for_in_opposite_orders(lay: Lay) -> None:
    lay("aabb")
    from allreduce.comm import replica_communicators
    from tests.harness import world_of_one

    others = replica_communicators(world_of_one(), 4, name="other", timeout=20)

    def call(comm: Communicator) -> list[float]:
        works = [
            one.all_reduce(np.full(200_000, 1.0), async_op=True)
            for one in (comm, others[comm.rank])
        ]
        order = works if comm.rank % 2 else works[::-1]
        return [float(work.wait()[0]) for work in order]

    assert settle_threads(call, 4) == [[4.0, 4.0]] * 4
    for other in others:
        other.close()


def test_replicas_get_the_same_bits(lay: Lay) -> None:
    lay("aaabb")

    def call(comm: Communicator) -> list[bytes]:
        draw = np.random.default_rng(comm.rank)
        found = []
        for dtype in ("float32", "float16"):
            x = draw.standard_normal(700_001).astype(dtype)
            found += [comm.all_reduce(x, op=op).tobytes() for op in ("sum", "mean")]
        return found

    first, *rest = settle_threads(call, 5)
    assert all(one == first for one in rest)


@pytest.mark.parametrize("hosts", ["aab", "abab"])
def test_plans_send_what_they_say(lay: Lay, hosts: str) -> None:
    lay(hosts)
    for wrong in run_threads(sends, len(hosts)):
        assert not wrong
    sent = run_threads(lambda comm: comm.plan("send", np.ones(5000), dest=0).sent, len(hosts))
    assert sent == [40000] * len(hosts)


def test_a_plan_tells_steps_and_bytes(lay: Lay) -> None:
    lay("aabb")

    def call(comm: Communicator) -> str:
        return str(comm.plan("all_reduce", np.ones(1 << 20, "float32"), op="sum"))

    text = settle_threads(call, 4)[0]
    assert isinstance(text, str)
    assert "2 hosts, 2 lanes through hierarchical" in text
    assert "between hosts, in this member's lane: all_reduce(float32[262144], op='sum')" in text
    assert "so for each of 2 chunks, whose steps overlap" in text
    assert "sends 2 MiB" in text
