"""The tcp transport between hosts: network namespaces that a bridge joins."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests import netns
from tests.comm.pool import ProcessPool
from tests.harness import clean_environment, run_commands


@pytest.fixture(scope="module")
def four() -> Iterator[list[netns.Host]]:
    with netns.hosts(4) as made:
        yield made


@pytest.mark.torture  # hierarchical's tests cross the same hosts by tcp
def test_two_ranks_on_each_of_four_hosts(four: list[netns.Host]) -> None:
    ranks = [(own, host.command()) for host, own in netns.explicit_ranks(four, 2)]
    pool = ProcessPool(8, "tcp", ranks)
    for case, *arguments in (("numbers",), ("unequal", "private"), ("in_flight",)):
        pool.run(case, *arguments)
    assert pool.close() == [0] * 8


SHOW = "import allreduce as ar; c = ar.init(); print(c.local_rank, c.local_size, c.transport)"


def test_ranks_know_who_shares_their_host(four: list[netns.Host]) -> None:
    ranks = netns.explicit_ranks(four[:2], 2)
    results = run_commands(
        [host.command(sys.executable, "-c", SHOW) for host, _ in ranks],
        [{**clean_environment(), **own, "ALLREDUCE_TRANSPORT": "tcp"} for _, own in ranks],
        30,
    )
    assert [result.stdout for result in results] == ["0 2 tcp\n", "1 2 tcp\n"] * 2, results


def test_an_interface_that_is_none_is_told_on_all_ranks(four: list[netns.Host]) -> None:
    ranks = netns.explicit_ranks(four[:2], 1)
    own = {"ALLREDUCE_TCP_INTERFACE": "ib0"}
    results = run_commands(
        [host.command(sys.executable, "-c", SHOW) for host, _ in ranks],
        [
            {**clean_environment(), **each, "ALLREDUCE_TRANSPORT": "tcp", **(own if i else {})}
            for i, (_, each) in enumerate(ranks)
        ],
        30,
    )
    for result in results:
        assert "ALLREDUCE_TCP_INTERFACE='ib0' is no interface" in result.stderr, result
        assert "there are lo, eth0" in result.stderr
