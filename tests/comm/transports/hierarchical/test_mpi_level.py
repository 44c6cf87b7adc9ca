"""The hierarchical transport with MPI between hosts, which are made up on one machine."""

from __future__ import annotations

import json
import re

import pytest

from allreduce import errors
from allreduce.comm.registry import opener
from tests.comm.contract import ContractOfProcesses, rows
from tests.comm.ranks import pool
from tests.comm.ranks.hosts import lay_out
from tests.comm.ranks.pool import Ranks, Runner
from tests.comm.transports.test_handshake import worlds
from tests.harness import world_of_one


@rows("aab", torture=("aabb", "ab"))
class TestRanks(ContractOfProcesses):
    ranks = Ranks("hierarchical", pool.under_mpirun)
    times = 1  # as of mpi alone

    @pytest.mark.parametrize("case", ["between_hosts", "collected", "late"])
    def test_its_own(self, run: Runner, case: str) -> None:
        run(case)

    def test_members_that_disagree_all_say_so(self, run: Runner) -> None:
        for rank, line in enumerate(run("disagreeing")):
            assert re.match(rf"\[hierarchical\] \S+: rank {rank}: call #0 differs: ", line), line


def test_ranks_that_want_another_carrier_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (world,) = worlds(2)[:1]
    told = [json.dumps([1, across]).encode() for across in ("tcp", "mpi")]
    monkeypatch.setattr(type(world), "exchange", lambda *_: told)
    with pytest.raises(errors.UsageError, match="is tcp on rank 0 but mpi on rank 1; set the same"):
        opener("hierarchical")(world, 1, name="test", timeout=5)


def test_what_mpi_cannot_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(monkeypatch, "ab")
    monkeypatch.setenv("ALLREDUCE_ACROSS", "mpi")
    with pytest.raises(errors.UnsupportedError, match=r"'every' failed: .*brings 2; start one"):
        opener("hierarchical")(world_of_one(), 2, name="test", timeout=5)


@pytest.mark.parametrize("name", ["ib", "shared"])
def test_what_carries_nothing_between_hosts_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ALLREDUCE_ACROSS", name)
    unknown = f"ALLREDUCE_ACROSS: unknown transport between hosts '{name}': there are mpi, tcp"
    with pytest.raises(errors.UsageError, match=unknown):
        opener("hierarchical")(world_of_one(), 1, name="test", timeout=5)
