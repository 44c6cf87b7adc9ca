"""Members that read each other's memory: a single copy, forbidden reads, and ends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator
from tests.comm.ranks.pool import ProcessPool, Runner, threads
from tests.comm.ranks.tables import SOON, before_the_table
from tests.harness import run_ranks, settle_threads


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    pool = ProcessPool(3)
    yield partial(pool.run, "cross_process")
    assert pool.close() == [0] * 3


@pytest.mark.parametrize("case", ["copies", "freed", "dropped", "owned_again", "withheld"])
def test_of_processes(run: Runner, case: str) -> None:
    assert run("way_of", "broadcast", 5000) == ["cross_process"] * 3
    run(case)


def test_unequal_shares_of_processes(run: Runner) -> None:
    run("unequal", "private")


@pytest.mark.parametrize("case", ["copies", "owned_again"])
def test_of_threads(case: str) -> None:
    with before_the_table(SOON), threads("shared", "aaa") as ranks:
        ranks(case)


def forbidden(how: str) -> None:
    """Be a rank whose memory cannot be read, or that cannot read others'; make a call anyway."""
    import ctypes
    import os

    import numpy as np

    from allreduce.comm import init
    from tests.comm.ranks.tables import SOON, before_the_table

    libc = ctypes.CDLL(None, use_errno=True)
    if how == "kernel":  # not even by the same user, unless it may trace all processes
        nothing = (ctypes.c_uint32 * 6)()
        assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing) == 0
        assert libc.prctl(4, int(os.environ["ALLREDUCE_RANK"] == "0"), 0, 0, 0) == 0  # dumpable
    elif os.environ["ALLREDUCE_RANK"] == "1":
        os.environ["ALLREDUCE_SHARED_PULL"] = "off"
    with before_the_table(SOON):
        comm = init()
    x = np.full(70001, comm.rank, "float32")
    print(comm.plan("all_gather", x).algorithm, comm.all_gather(x)[::70001])
    comm.close()


@pytest.mark.parametrize("how", ["kernel", "variable"])
def test_where_one_may_not_all_go_through_rings(how: str) -> None:
    env = {"ALLREDUCE_TRANSPORT": "shared", "ALLREDUCE_LOG_LEVEL": "INFO"}
    results = run_ranks(forbidden, 2, env=env, arguments=(how,))
    told = {
        "kernel": "rank 0 cannot read the others' memory: Operation not permitted",
        "variable": "rank 1 has that switched off, by ALLREDUCE_SHARED_PULL=off",
    }
    for result in results:
        assert (result.returncode, result.stdout) == (0, "pairwise [0. 1.]\n"), result
        assert f"not straight out of memory: {told[how]}" in result.stderr


def failing(how: str) -> None:
    """Be one of three ranks, of which one dies, or stops, in the middle of large calls."""
    import os
    import signal
    import threading
    import time

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init
    from tests.comm.ranks.tables import SOON, before_the_table

    with before_the_table(SOON):
        comm = init()
    x = np.full(3 << 20, comm.rank + 1.0, "float32")
    collective = comm.all_gather if how == "dies" else comm.all_to_all
    for _ in range(3):
        collective(x)
    if comm.rank == 1 and how == "dies":
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif comm.rank == 1:
        collective(x, async_op=True)
        while not comm.dead:
            time.sleep(0.01)
        os._exit(0)
    try:
        while True:
            got = collective(x, async_op=True).wait(timeout=30 if how == "dies" else 2)
            assert set(got[:: 1 << 18].tolist()) == {1, 2, 3}
    except errors.AllreduceError as error:
        print(error)


@pytest.mark.parametrize(
    ("how", "told"), [("dies", "rank 1 (process"), ("stops", "after 2 s: rank 1 made its last")]
)
def test_one_that_fails_meanwhile_is_named(how: str, told: str) -> None:
    env = {"ALLREDUCE_TRANSPORT": "shared"}
    first, second, third = run_ranks(failing, 3, env=env, arguments=(how,))
    assert second.returncode == (-9 if how == "dies" else 0)
    for survivor in (first, third):
        assert survivor.returncode == 0, survivor
        assert told in survivor.stdout


def test_one_that_fails_meanwhile_takes_its_array_back() -> None:
    """Threads copy out of it until it fails, and not later."""

    def member(comm: Communicator) -> str:
        x = np.full(2 << 20, comm.rank, "float32")
        work = comm.broadcast(x, root=2, async_op=True)
        if comm.rank == 2:
            comm.abort("enough")
            x.resize(1, refcheck=False)
        try:  # it may have been fast enough
            return "enough" if set(work.wait()[::1000].tolist()) == {2} else "torn"
        except (errors.PeerLostError, errors.ClosedError) as error:
            return str(error)

    with before_the_table(SOON):
        for outcomes in (settle_threads(member, 3) for _ in range(10)):
            assert all("enough" in str(outcome) for outcome in outcomes), outcomes
