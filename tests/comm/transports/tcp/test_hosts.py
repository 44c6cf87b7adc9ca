"""The tcp transport between hosts: network namespaces that a bridge joins."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests import netns
from tests.comm.ranks.pool import ProcessPool
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
        60,
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
        60,
    )
    for result in results:
        assert "ALLREDUCE_TCP_INTERFACE='ib0' is no interface" in result.stderr, result
        assert "there are lo, eth0" in result.stderr


VANISHED = """
import os, subprocess, time
import numpy as np
import allreduce as ar

comm = ar.init()
x = np.ones(4_000_000, "float32")
for _ in range(3):
    comm.all_reduce(x)
works = [comm.all_reduce(x, async_op=True) for _ in range(8)]  # so that data is on its way
if comm.rank == 1:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
began = time.monotonic()
try:
    while True:
        comm.all_reduce(x)
except ar.errors.PeerLostError as error:
    print(time.monotonic() - began < 40, error, flush=True)
os._exit(0)
"""


@pytest.mark.torture  # 25 s of waiting
def test_a_host_that_vanishes_with_data_on_its_way_is_found() -> None:
    with netns.hosts(2) as two:
        ranks = netns.explicit_ranks(two, 1)
        results = run_commands(
            [host.command(sys.executable, "-c", VANISHED) for host, _ in ranks],
            [{**clean_environment(), **own, "ALLREDUCE_TRANSPORT": "tcp"} for _, own in ranks],
            90,
        )
    for rank, result in enumerate(results):
        told = f"True [tcp] rank {rank}: rank {1 - rank} (process "
        assert result.stdout.startswith(told), results
        assert "cannot be reached any more; the communicator is dead" in result.stdout
