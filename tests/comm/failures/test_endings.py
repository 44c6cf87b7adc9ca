"""How ranks as processes end: killed, interrupted, or in good order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import run_ranks

# A net for a busy machine, far below the communicator's timeout. `make torture` holds survivors to
# half a second.
SOON_SECONDS = 20


def _victim(victim: int, size: int, inside: bool) -> None:
    import os
    import signal
    import time

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init

    comm = init()
    x = np.ones(3_000_000, "float32")
    comm.all_reduce(x)
    if comm.rank == victim:
        if inside:
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # which ends the process
            while True:
                comm.all_reduce(x)
        print("dies", time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.all_reduce(x)
    except errors.PeerLostError as error:
        print(time.monotonic(), error, flush=True)
        os._exit(7)


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 1), (4, 3)])
def test_survivors_name_the_killed_rank_soon(size: int, victim: int) -> None:
    results = run_ranks(_victim, size, arguments=(victim, size, False))
    died = float(results[victim].stdout.split()[1])
    for rank, result in enumerate(results):
        if rank != victim:
            assert result.returncode == 7, result
            seconds, message = result.stdout.split(" ", 1)
            assert f"rank {rank}: rank {victim} (process" in message
            assert "died" in message
            assert float(seconds) - died < SOON_SECONDS


def test_a_rank_killed_inside_a_collective_is_named() -> None:
    results = run_ranks(_victim, 3, arguments=(1, 3, True))
    assert results[1].returncode == -14
    for rank in (0, 2):
        assert f"rank {rank}: rank 1 (process" in results[rank].stdout, results
        lost = "died before it completed all_reduce(float32[3000000], op='sum') #"
        assert lost in results[rank].stdout, results


def _dies_in_the_meeting() -> None:
    """Rank 2 dies before it has proved itself to rank 0, which keeps its error for a while."""
    import os
    import signal
    import time
    from typing import Any

    from allreduce import errors
    from allreduce.comm import init, world
    from allreduce.comm.transports import handshake

    joined = world()
    if joined.rank == 2:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        handshake.call = die  # type: ignore[assignment]
    kept: list[errors.PeerLostError] = []
    try:
        init(transport="shared")
    except errors.PeerLostError as error:
        kept.append(error)
    began = time.monotonic()
    if joined.rank == 1:
        joined.store.set("rank 1 knows", b"")
    until = time.monotonic() + 25
    while joined.rank == 0 and time.monotonic() < until:
        try:
            joined.store.get("rank 1 knows", 0.1)
            break
        except errors.AllreduceError:
            time.sleep(0.01)
    print(time.monotonic() - began < 24, kept[0], flush=True)
    os._exit(0)


def test_who_waits_for_an_introduction_hears_of_a_death_with_who_was_to_make_it() -> None:
    *survivors, dead = run_ranks(_dies_in_the_meeting, 3)
    assert dead.returncode == -9
    for rank, result in enumerate(survivors):
        assert result.stdout.startswith(f"True [cluster] rank {rank}: rank 2 (process"), result


def _leaves_for_a_death(transport: str, folder: str) -> None:
    """Rank 0 leaves and rank 2 dies before rank 1, which waits for both, notices either."""
    import os
    import select
    import signal
    import time
    from pathlib import Path

    from allreduce import errors
    from allreduce.comm import init, world
    from tests.harness import stop

    comm = init(transport=transport)
    comm.barrier()
    waits, (_, waiting, dying) = Path(folder, "waits"), [one.pid for one in world().members]
    if comm.rank == 1:
        waits.touch()
        try:
            comm.barrier()
        except errors.PeerLostError as error:
            print(error, flush=True)
    elif comm.rank == 0:
        while not waits.exists():
            time.sleep(0.01)
        stop(waiting)
        comm.close()
        os.kill(dying, signal.SIGKILL)
        select.select([os.pidfd_open(dying)], [], [])  # all its threads have let go of its files
        os.kill(waiting, signal.SIGCONT)
    else:
        time.sleep(60)
    os._exit(0)


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_a_death_is_told_rather_than_that_another_left_for_it(
    transport: str, tmp_path: Path
) -> None:
    results = run_ranks(_leaves_for_a_death, 3, arguments=(transport, str(tmp_path)))
    assert [result.returncode for result in results] == [0, 0, -9], results
    assert "rank 1: rank 2 (process" in results[1].stdout, results


def _interrupted() -> None:
    import os
    import signal
    import threading
    import time

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init

    comm = init()
    start = time.monotonic()
    try:
        if comm.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        while comm.rank == 1 and not comm.dead:
            time.sleep(0.01)
        comm.all_reduce(np.ones(10))
    except (KeyboardInterrupt, errors.PeerLostError) as error:
        soon, interrupt = time.monotonic() - start < 20, errors.is_interrupt(error)
        print(type(error).__name__, soon, interrupt, error, flush=True)
        os._exit(0)


def test_ctrl_c_ends_a_wait_and_the_others_learn_why() -> None:
    first, second = run_ranks(_interrupted, 2)
    assert first.stdout.startswith("KeyboardInterrupt True True")
    assert second.stdout.startswith("PeerLostError True True")
    assert "rank 0 aborted the communicator: a wait was interrupted by Keyboard" in second.stdout


def _raises() -> None:
    import numpy as np

    from allreduce.comm import init

    comm = init()
    comm.all_reduce(np.ones(5), op="sum" if comm.rank == 0 else "summ")


def test_an_error_that_ends_a_rank_is_told_to_the_others() -> None:
    first, second = run_ranks(_raises, 2)
    assert (first.returncode, second.returncode) == (1, 1)
    mistake = "UsageError: [shared] rank 1: all_reduce: unknown operator 'summ'"
    assert mistake in second.stderr
    said, place = first.stderr.splitlines()[-2:]
    assert "comm.all_reduce(np.ones(5)" in place
    assert "PeerLostError: [shared] rank 0: rank 1 aborted the communicator: its program " in said
    assert mistake in said


def _raises_in_a_block() -> None:
    import numpy as np

    import allreduce as ar

    with ar.init() as comm:
        for step in range(100):
            if comm.rank == 1 and step == 50:
                raise ValueError("no such file")
            comm.all_reduce(np.ones(5), op="sum")


def test_an_error_that_ends_a_block_is_told_to_the_others() -> None:
    first, second = run_ranks(_raises_in_a_block, 2)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "[allreduce] rank 1 failed at " in second.stderr
    said, place = first.stderr.splitlines()[-2:]
    assert "dispatch.py" not in first.stderr  # the traceback ends with the user's line
    assert "rank 1 aborted the communicator: its `with` block ended with ValueError: no" in said
    assert place.startswith("[allreduce] rank 0 stopped at ")


def _goes_on_after_a_block() -> None:
    import numpy as np

    import allreduce as ar

    try:
        with ar.init() as comm:
            if comm.rank == 1:
                raise ValueError("no such file")
            comm.barrier()
    except (ValueError, ar.PeerLostError) as error:
        print(type(error).__name__)
    with ar.init() as comm:
        print(comm.all_reduce(np.ones(1)))


def test_programs_may_join_again_after_a_block_that_ended_with_an_error() -> None:
    first, second = run_ranks(_goes_on_after_a_block, 2)
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert first.stdout.split() == ["PeerLostError", "[2.]"]
    assert second.stdout.split() == ["ValueError", "[2.]"]


def _exits_with_a_text() -> None:
    import sys

    import numpy as np

    from allreduce.comm import init

    comm = init()
    if comm.rank == 1:
        sys.exit("no more disk\nat all")
    comm.all_reduce(np.ones(5))


def test_an_exit_ends_those_who_wait_for_its_rank() -> None:
    first, second = run_ranks(_exits_with_a_text, 2)
    assert (first.returncode, second.returncode) == (1, 1)
    assert second.stderr.endswith("no more disk\nat all\n")
    assert re.search(r"PeerLostError: .* rank 1 \(process \d+\) left normally", first.stderr)


def _ends_without_close(code: int) -> None:
    import sys

    import numpy as np

    from allreduce.comm import init

    comm = init()
    for _ in range(30):
        comm.all_reduce(np.ones(500_001))
    if comm.rank == 1:
        comm.all_reduce(np.ones(5), async_op=True)  # not awaited: must not delay the end
    sys.exit(code)


def test_ranks_may_end_without_close() -> None:
    assert [r.returncode for r in run_ranks(_ends_without_close, 3, arguments=(0,))] == [0] * 3
