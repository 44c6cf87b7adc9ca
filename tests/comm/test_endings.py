"""How ranks as processes end: killed, interrupted, forked, short of memory, or in good order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import run_ranks


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
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
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
def test_survivors_name_the_killed_rank_within_half_a_second(size: int, victim: int) -> None:
    results = run_ranks(_victim, size, arguments=(victim, size, False))
    died = float(results[victim].stdout.split()[1])
    for rank, result in enumerate(results):
        if rank != victim:
            assert result.returncode == 7, result
            seconds, message = result.stdout.split(" ", 1)
            assert f"rank {rank}: rank {victim} (process" in message
            assert "died" in message
            assert float(seconds) - died < 0.5


def test_a_rank_killed_inside_a_collective_is_named() -> None:
    results = run_ranks(_victim, 3, arguments=(1, 3, True))
    assert results[1].returncode == -14
    for rank in (0, 2):
        assert f"rank {rank}: rank 1 (process" in results[rank].stdout, results


def _interrupted() -> None:
    import os
    import signal
    import threading
    import time

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init

    comm = init()
    if comm.rank == 1:
        time.sleep(2)
    else:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        comm.all_reduce(np.ones(10))
    except (KeyboardInterrupt, errors.PeerLostError) as error:
        print(type(error).__name__, time.monotonic() - start < 1, error, flush=True)
        os._exit(0)


def test_ctrl_c_ends_a_wait_and_the_others_learn_why() -> None:
    first, second = run_ranks(_interrupted, 2)
    assert first.stdout.startswith("KeyboardInterrupt True")
    assert "PeerLostError" in second.stdout
    assert "rank 0 aborted the communicator: all_reduce was interrupted by Keyb" in second.stdout


def _forked() -> None:
    import multiprocessing
    import os
    import signal
    import time
    import warnings

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init

    warnings.simplefilter("ignore")
    comm = init()

    def child(queue: object) -> None:
        for attempt in (lambda: comm.all_reduce(np.ones(3)), init):
            try:
                attempt()
            except errors.AllreduceError as error:
                print(type(error).__name__, error, flush=True)
        time.sleep(30)

    comm.all_reduce(np.ones(3))
    if comm.rank == 0:
        process = multiprocessing.get_context("fork").Process(target=child, args=(None,))
        process.daemon = True
        process.start()
        time.sleep(0.5)
        comm.all_reduce(np.ones(3))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(np.ones(3))
        comm.all_reduce(np.ones(3))
    except errors.PeerLostError as error:
        print(error)
        os._exit(0)


def test_a_forked_child_cannot_take_part_nor_hide_its_parents_death() -> None:
    first, second = run_ranks(_forked, 2, timeout=20)
    assert "UsageError" in first.stdout, first
    assert "was forked from the process that joined" in first.stdout
    assert "JoinError" in first.stdout
    assert "rank 0 (process" in second.stdout
    assert "died" in second.stdout


def _forked_with_works() -> None:
    import os
    import threading
    import time
    import warnings
    from collections.abc import Callable

    import numpy as np

    from allreduce import errors
    from allreduce.comm import replica_communicators, world

    warnings.simplefilter("ignore")
    first, second = replica_communicators(world(), 2, name="forked", timeout=20)

    def refused_in_a_child(attempt: Callable[[], object]) -> bool:
        child = os.fork()
        if child == 0:
            try:
                attempt()
            except errors.UsageError:
                os._exit(0)
            os._exit(1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status == 0
            time.sleep(0.01)
        os.kill(child, 9)
        os.waitpid(child, 0)
        return False

    work = first.all_reduce(np.full(300_000, 1.0), async_op=True)
    print([refused_in_a_child(attempt) for attempt in (work.wait, work.done)])
    other = second.all_reduce(np.full(300_000, 2.0), async_op=True)
    print(set(other.wait()) | set(work.wait()))  # the children did nothing of it

    stop = threading.Event()

    def keep_busy(comm: object) -> None:
        x = np.ones(6_000_000)
        while comm.all_reduce(np.float64(stop.is_set())) == 0:  # type: ignore[attr-defined]
            comm.all_reduce(x)  # type: ignore[attr-defined]

    threads = [threading.Thread(target=keep_busy, args=(comm,)) for comm in (first, second)]
    for thread in threads:
        thread.start()
    # The other threads hold the members' locks most of the time.
    print({refused_in_a_child(lambda: first.all_reduce(np.ones(3))) for _ in range(20)})
    stop.set()
    for thread in threads:
        thread.join()


def test_a_child_forked_while_works_run_gets_an_error_and_leaves_them_alone() -> None:
    (result,) = run_ranks(_forked_with_works, 1, timeout=60)
    assert result.stdout.splitlines() == ["[True, True]", "{np.float64(3.0)}", "{True}"], result


def _dies_while_rank_0_allocates() -> None:
    import os
    import time

    from allreduce import errors
    from allreduce.comm import init, memory, symmetric

    comm = init()
    if comm.rank == 1:
        symmetric.Symmetric._map = lambda *_: os._exit(9)  # type: ignore[method-assign]
    allocate = memory.allocate

    def slowly(nbytes: int) -> int:
        time.sleep(0.5)
        return allocate(nbytes)

    memory.allocate = slowly
    start = time.monotonic()
    try:
        comm.empty(1000)
    except errors.PeerLostError as error:
        print(time.monotonic() - start < 1.5, error, flush=True)
    time.sleep(max(0, start + 3 - time.monotonic()))  # no survivor's end tells the others
    os._exit(0)


def test_a_rank_that_dies_while_memory_is_made_is_named_by_all() -> None:
    results = run_ranks(_dies_while_rank_0_allocates, 3)
    for rank in (0, 2):
        assert results[rank].stdout.startswith("True"), results
        assert f"rank {rank}: rank 1 (process" in results[rank].stdout


def _slow_to_allocate() -> None:
    import time

    from allreduce import errors
    from allreduce.comm import init, memory

    comm = init(timeout=1)
    allocate, delays = memory.allocate, [1.3, 0.0]

    def slowly(nbytes: int) -> int:
        time.sleep(delays.pop(0))
        return allocate(nbytes)

    memory.allocate = slowly
    try:
        comm.empty(100_000, "float64")
    except errors.OutOfMemoryError as error:
        print(error)
    x = comm.empty(100_000, "float64")
    x[:] = comm.rank + 1
    comm.all_reduce(x, out=x)
    print(set(x))


def test_memory_that_came_too_late_is_not_taken_for_the_next() -> None:
    for result in run_ranks(_slow_to_allocate, 2):
        assert "rank 1 got 'Connection timed out'" in result.stdout, result
        assert result.stdout.endswith("{np.float64(3.0)}\n"), result


def _short_of_memory() -> None:
    import resource

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init

    comm = init()
    if comm.rank == 1:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    try:
        comm.empty(32 << 20, "float32")
    except errors.OutOfMemoryError as error:
        print(error)
    print(comm.all_reduce(np.ones(3))[0])
    comm.close()


def test_memory_that_one_rank_cannot_map_is_refused_on_all() -> None:
    for result in run_ranks(_short_of_memory, 3):
        assert "rank 1 got 'Cannot allocate memory'" in result.stdout, result
        assert result.stdout.endswith("3.0\n")


def _short_at_the_start() -> None:
    import os
    import resource

    import allreduce.comm
    from allreduce import errors
    from allreduce.cluster import join

    world = allreduce.comm.world()
    assert join is not None
    if world.rank == 1:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), used + (2 << 20)))
    try:
        allreduce.comm.init()
    except errors.OutOfMemoryError as error:
        print(str(error), flush=True)
        os._exit(0)


def test_too_little_memory_for_the_communicator_is_an_error_on_all() -> None:
    for result in run_ranks(_short_at_the_start, 3):
        assert "rank 1 got 'Cannot allocate memory'" in result.stdout, result


def _ends_without_close(code: int) -> None:
    import sys

    import numpy as np

    from allreduce.comm import init

    comm = init()
    for _ in range(30):
        comm.all_reduce(np.ones(500_001))
    if comm.rank == 1:
        comm.all_reduce(np.ones(5), async_op=True)  # nobody waits: must not hold up the end
    sys.exit(code)


def test_ranks_may_end_without_close() -> None:
    assert [r.returncode for r in run_ranks(_ends_without_close, 3, arguments=(0,))] == [0] * 3


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def listing() -> set[str]:
        return set(os.listdir("/dev/shm"))

    before = listing()
    run_ranks(_victim, 3, arguments=(1, 3, False), env={"TMPDIR": str(tmp_path)})
    assert listing() <= before
    assert not list(tmp_path.iterdir())
