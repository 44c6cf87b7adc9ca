"""The tcp transport, by threads and by processes."""

from __future__ import annotations

from tests.comm.contract import Bounded, Contract, ContractOfProcesses, rows
from tests.comm.ranks import pool
from tests.comm.ranks.pool import Ranks


@rows("a", "aaa", torture=("aa", "aaaa", "aaaaaaa"))
class TestThreads(Contract):
    ranks = Ranks("tcp", pool.threads)


@rows("aaa", torture=("aa", "aaaa", "aaaaaaa"))
class TestProcesses(Bounded, ContractOfProcesses):
    ranks = Ranks("tcp", pool.processes)
