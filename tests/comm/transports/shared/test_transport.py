"""The shared transport, by threads and by processes."""

from __future__ import annotations

import re

from tests.comm.contract import Bounded, Contract, ContractOfProcesses, Symmetric, rows
from tests.comm.ranks import pool
from tests.comm.ranks.pool import Ranks, Runner


@rows("a", "aaa", torture=("aa", "aaaa", "aaaaaaa"))
class TestThreads(Contract, Symmetric):
    ranks = Ranks("shared", pool.threads)


@rows("aaa", torture=("a", "aa", "aaaa", "aaaaaaa"))
class TestProcesses(Bounded, ContractOfProcesses, Symmetric):
    ranks = Ranks("shared", pool.processes)

    def test_of_a_call_that_all_have_made_it_is_said_where_it_is_under_way(
        self, run: Runner
    ) -> None:
        said = run("slow")
        if len(said) == 1:  # a single member drives all
            return
        (line,), *others = said
        under_way = "all ranks have made the call, and it is still in progress here and on rank 1"
        assert re.search(rf"#\d+: {under_way} \(process \d+ is alive\)", line), line
        assert not any(others)
