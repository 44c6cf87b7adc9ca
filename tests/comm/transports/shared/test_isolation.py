"""Another member that continues after an error must not change this member's arrays."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator
from tests.comm.ranks.tables import LONG_STEPS, before_the_table
from tests.harness import Result, run_ranks, run_threads

COUNT = 1 << 24


def _stops_in_a_store(folder: str, count: int, what: str, ending: str) -> None:
    from tests.comm.ranks.tables import LONG_STEPS, before_the_table
    from tests.comm.transports.shared.stops import stop_in_a_store

    with before_the_table(LONG_STEPS):
        stop_in_a_store(folder, count, what, ending)


def _stop(folder: Path, what: str, ending: str) -> Result:
    return run_ranks(
        _stops_in_a_store, 2, arguments=(str(folder), COUNT, what, ending), timeout=100
    )[0]


@pytest.mark.parametrize(
    ("what", "ending"),
    [("reduce", "timeout"), ("update", "timeout"), ("reduce", "abort"), ("reduce", "leave")],
)
def test_a_process_that_was_stopped_in_a_store_changes_nothing_after_the_error(
    what: str, ending: str, tmp_path: Path
) -> None:
    result = _stop(tmp_path, what, ending)
    assert result.stdout == "True 0 0\n", result


def test_an_error_says_that_memory_is_too_short_to_keep_others_out(tmp_path: Path) -> None:
    result = _stop(tmp_path, "reduce", "short")
    for text in (result.stdout, result.stderr):
        assert f"{4 * COUNT} bytes of this rank's comm.empty arrays could not be made" in text
        assert f"{8 * COUNT} bytes are needed" in text
        assert text.count("could not be made") == 1


def test_a_thread_in_a_step_is_waited_for_before_the_error() -> None:
    def call(comm: Communicator) -> None:
        x = comm.empty(COUNT, "float32")
        x[:] = 1 + comm.rank
        comm.barrier()
        work = comm.all_reduce(x, op="max", out=x, async_op=True)
        if comm.rank == 1:
            with suppress(errors.AllreduceError):  # unless the call was complete before the error
                work.wait()
            return
        until = time.monotonic() + 10
        while x[COUNT // 2] == 1 and time.monotonic() < until:
            pass
        comm.abort("enough")
        x[-100:] = -7  # where the step comes last
        time.sleep(0.1)
        np.testing.assert_array_equal(x[-100:], -7)

    with before_the_table(LONG_STEPS):
        for _ in range(3):  # the step may be over before the error
            run_threads(call, 2)


def _stops_at_random(seed: int) -> None:
    import os
    import random
    import signal
    import threading
    import time

    from allreduce import errors
    from allreduce.comm import init, world

    comm = init(transport="shared", timeout=20)
    x = comm.empty((1 << 24,), "float32")
    x[:] = 1
    comm.barrier()
    if comm.rank == 1:
        try:
            while True:
                comm.all_reduce(x, op="max", out=x)
        except errors.AllreduceError:
            time.sleep(4)
        os._exit(0)
    pid = world().members[1].pid
    delay = random.Random(seed).random() * 0.5
    threading.Timer(delay, os.kill, (pid, signal.SIGSTOP)).start()
    try:
        while True:
            comm.all_reduce(x, op="max", out=x, async_op=True).wait(timeout=1)
    except errors.TimeoutError:
        x[:] = -7
    os.kill(pid, signal.SIGCONT)
    until, changed = time.monotonic() + 3, 0
    while time.monotonic() < until:
        changed = max(changed, int((x != -7).sum()))
    os.kill(pid, signal.SIGKILL)
    print(changed, flush=True)
    os._exit(0)


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_process_that_was_stopped_at_random_changes_nothing_after_the_error() -> None:
    until, seed = time.monotonic() + 10, 0
    while time.monotonic() < until or seed < 3:
        result = run_ranks(_stops_at_random, 2, arguments=(seed,))[0]
        assert result.stdout == "0\n", (seed, result)
        seed += 1
