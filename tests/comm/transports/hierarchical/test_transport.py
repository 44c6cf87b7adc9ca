"""The hierarchical transport: the contract, with members laid out as if on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from allreduce.comm import ANY, Communicator
from tests import netns
from tests.comm.calls.test_plans import sends
from tests.comm.contract import Bounded, Contract, ContractOfProcesses, rows
from tests.comm.ranks import pool
from tests.comm.ranks.hosts import lay_out
from tests.comm.ranks.pool import ProcessPool, Ranks
from tests.harness import run_threads, settle_threads

Lay = Callable[[str], None]


@pytest.fixture
def lay(monkeypatch: pytest.MonkeyPatch) -> Lay:
    return partial(lay_out, monkeypatch)


@rows("aab")
class TestProcesses(Bounded, ContractOfProcesses):
    ranks = Ranks("hierarchical", pool.processes)


@rows(torture=("a", "aa", "ab", "abab", "abba", "aabb", "aaabb", "aabbccc"))
class TestThreads(Contract):
    ranks = Ranks("hierarchical", pool.threads)


@pytest.fixture(scope="module")
def four() -> Iterator[list[netns.Host]]:
    with netns.hosts(4) as made:
        yield made


@pytest.fixture(scope="module")
def namespaces(four: list[netns.Host]) -> Iterator[ProcessPool]:
    """Two ranks on each of four hosts, which find out by themselves that they are four."""
    ranks = [(own, host.command()) for host, own in netns.explicit_ranks(four, 2)]
    made = ProcessPool(8, None, ranks)
    yield made
    assert made.close() == [0] * 8


def test_what_crosses_between_hosts_is_what_the_plan_says(namespaces: ProcessPool) -> None:
    seen = namespaces.run("crossings")
    for rank, calls in enumerate(seen):
        for name, planned, crossed in calls:
            assert planned == crossed, (rank, name)
    everywhere = {name: sum(calls[i][1] for calls in seen) for i, (name, *_) in enumerate(seen[0])}
    # Each of 4 hosts sends its reduced part and receives the others': a ring's bytes, once per host
    # instead of per rank.
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
    with pool.processes(None, "aba") as run:
        assert run("whereabouts") == [
            ["hierarchical", 0, 2],
            ["hierarchical", 0, 1],
            ["hierarchical", 1, 2],
        ]
        run("layouts")


def test_waiting_for_a_message_drives_what_was_started_before(lay: Lay) -> None:
    lay("abab")

    def call(comm: Communicator) -> float:
        total = comm.all_reduce(np.full(300_000, 1.0 + comm.rank), async_op=True)
        got = np.zeros(1)
        if comm.rank == 0:  # waits for a message that follows the others' waits
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
