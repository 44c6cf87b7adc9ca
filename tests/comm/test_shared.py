"""The shared transport, by threads and by processes."""

from __future__ import annotations

from tests.comm import pool
from tests.comm.contract import Contract, ContractOfProcesses, Symmetric, rows
from tests.comm.pool import Ranks


@rows("a", "aaa", torture=("aa", "aaaa", "aaaaaaa"))
class TestThreads(Contract, Symmetric):
    ranks = Ranks("shared", pool.threads)


@rows("aa", "aaa", torture=("a", "aaaa", "aaaaaaa"))
class TestProcesses(ContractOfProcesses, Symmetric):
    ranks = Ranks("shared", pool.processes)
