"""A forked child cannot use its parent's communicator, and does not hide its parent's death."""

from __future__ import annotations

from tests.harness import run_ranks


def _forked() -> None:
    import multiprocessing
    import os
    import signal
    import time
    import warnings
    from multiprocessing.synchronize import Event

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init

    warnings.simplefilter("ignore")
    comm = init()
    fork = multiprocessing.get_context("fork")

    def child(said: Event) -> None:
        for attempt in (lambda: comm.all_reduce(np.ones(3)), init):
            try:
                attempt()
            except errors.AllreduceError as error:
                print(type(error).__name__, error, flush=True)
        said.set()
        time.sleep(60)

    comm.all_reduce(np.ones(3))
    if comm.rank == 0:
        said = fork.Event()
        fork.Process(target=child, args=(said,), daemon=True).start()
        assert said.wait(25)
        comm.all_reduce(np.ones(3))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(np.ones(3))
        comm.all_reduce(np.ones(3))
    except errors.PeerLostError as error:
        print(error)
        os._exit(0)


def test_a_forked_child_cannot_take_part_nor_hide_its_parents_death() -> None:
    first, second = run_ranks(_forked, 2)
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
        deadline = time.monotonic() + 25
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
    work = first.all_gather(np.full(1, 1), async_op=True)
    # As another thread may.
    with first._dispatch.transport._lock:  # type: ignore[attr-defined]
        attempts = work.wait, work.done, lambda: first.all_reduce(np.full(300_000, 1.0))
        print([refused_in_a_child(attempt) for attempt in attempts])
    other = second.all_gather(np.full(1, 2), async_op=True)
    print(work.wait(), other.wait())

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
    (result,) = run_ranks(_forked_with_works, 1, timeout=90)
    staged = ["[True, True, True]", "[1 2] [1 2]"]
    expected = ["[True, True]", "{np.float64(3.0)}", *staged, "{True}"]
    assert result.stdout.splitlines() == expected, result


def _forked_while_joining() -> None:
    import os
    import socket
    import threading
    import warnings

    from allreduce.cluster.leader import meeting
    from allreduce.comm import init

    meeting.PATIENCE = 60  # longer than the test lasts
    warnings.simplefilter("ignore")  # of forks beside threads
    for name in [name for name in os.environ if name.startswith("ALLREDUCE_")]:
        del os.environ[name]

    with socket.create_server(("127.0.0.1", 0)) as silent:  # whoever connects is left waiting
        named = {"rank": 1, "size": 2, "leader": f"127.0.0.1:{silent.getsockname()[1]}"}
        joining = threading.Thread(target=init, kwargs=named)
        joining.start()
        _connection = silent.accept()
        child = os.fork()
        if child == 0:
            os._exit(10 + init(rank=0, size=1).size)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), joining.is_alive(), flush=True)
        os._exit(0)


def test_a_child_forked_while_another_thread_joins_does_not_wait_for_that_thread() -> None:
    (result,) = run_ranks(_forked_while_joining, 1, timeout=50)
    assert result.returncode == 0, result
    assert result.stdout == "11 True\n", result
