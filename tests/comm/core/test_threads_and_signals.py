"""Other threads and signal handlers in the middle of a call damage no array."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.transports.native import NativeTransport, NativeWork
from allreduce.comm.transports.shared.failures import SharedFailureReporter
from allreduce.errors import AllreduceError, ClosedError, PeerLostError
from tests.comm.ranks.hosts import lay_out
from tests.harness import run_ranks, run_threads

COUNT = 50_000


def test_a_start_that_is_interrupted_kills_the_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep = NativeTransport._keep
    main = threading.Event()

    def interrupt(self: NativeTransport[Any], work: NativeWork[Any]) -> None:
        if self.index == 0 and not main.is_set():
            main.set()
            raise KeyboardInterrupt  # as a handler may, right after the native start
        keep(self, work)

    monkeypatch.setattr(NativeTransport, "_keep", interrupt)

    def call(comm: Communicator) -> str:
        x = np.ones(COUNT, np.float32)
        if comm.rank == 1:
            with pytest.raises(PeerLostError, match="a start was interrupted by KeyboardInterrupt"):
                # The first call may complete, as all have begun it.
                [comm.all_reduce(x, async_op=True).wait(10) for _ in range(2)]
            return "told"
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(x, out=x, async_op=True)
        left = x.copy()  # the other one, in this process, may have done some of it
        with pytest.raises(ClosedError, match="dead since"):
            comm.barrier()
        assert (x == left).all()  # it is no longer written to
        return "dead"

    assert run_threads(call, 2) == ["dead", "told"]


@pytest.mark.parametrize("at", ["_keep", "error"])  # while a call starts; while one has failed
def test_a_handler_may_abort_whatever_it_interrupts(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    handled: list[int] = []
    aborted = threading.Event()

    def call(comm: Communicator) -> str:
        if comm.rank == 1:
            if at == "error":
                comm.abort("over")
            else:  # a call that all have begun may complete
                aborted.wait(25)
            with pytest.raises(AllreduceError):
                comm.all_reduce(np.ones(COUNT))
            return "told"
        owner: Any = NativeTransport if at == "_keep" else SharedFailureReporter
        do = getattr(owner, at)

        def interrupted(self: Any, *given: Any) -> Any:
            if not handled and (self.index if at == "_keep" else self.me) == 0:
                handled.append(1)
                comm.abort("preempted")
                aborted.set()
            return do(self, *given)

        monkeypatch.setattr(owner, at, interrupted)
        with pytest.raises(AllreduceError):
            comm.all_reduce(np.ones(COUNT), async_op=True).wait()
        with pytest.raises(ClosedError, match="this member aborted it: preempted"):
            comm.barrier()
        return "aborted"

    assert run_threads(call, 2, 10) == ["aborted", "told"]
    assert handled


def test_a_member_leaves_though_its_close_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: NativeWork[Any]) -> bool:
        raise KeyboardInterrupt

    def call(comm: Communicator) -> str:
        if comm.rank == 1:
            with pytest.raises(PeerLostError, match="left normally"):
                comm.recv(np.ones(3), source=0)
            return "told"
        comm.all_reduce(np.ones(COUNT), async_op=True)
        with monkeypatch.context() as patch:
            patch.setattr(NativeWork, "settled", property(interrupt))
            with pytest.raises(KeyboardInterrupt):
                comm.close()
        return "left"

    assert run_threads(call, 2, 10, comm_timeout=3) == ["left", "told"]


def test_threads_that_wait_for_one_work_get_one_result() -> None:
    def call(comm: Communicator) -> bool:
        right = True
        for _ in range(20):
            work = comm.all_reduce(np.ones(COUNT), postscale=0.5, async_op=True)
            results: list[float] = []
            threads = [
                threading.Thread(target=lambda to=results, of=work: to.append(of.wait().max()))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            right = right and results == [1.0, 1.0]
        return right

    assert run_threads(call, 2) == [True, True]


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_close_ends_the_wait_of_another_thread(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    waiting = threading.Event()
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    if transport == "hierarchical":
        lay_out(monkeypatch, "ab")

    def call(comm: Communicator) -> str | None:
        if comm.rank == 1:
            waiting.wait(25)
            return None
        work = comm.all_reduce(np.ones(COUNT), async_op=True)
        caught: list[AllreduceError] = []

        def wait() -> None:
            try:
                work.wait(20)
            except AllreduceError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.02)  # it waits by now
        comm._close(drain=False)
        thread.join(25)
        waiting.set()
        return f"{type(caught[0]).__name__}: {caught[0]}"

    error = run_threads(call, 2)[0]
    assert error is not None
    assert error.startswith("ClosedError")
    assert "is closed" in error


def _holds_the_gil() -> None:
    import ctypes
    import threading
    import time

    from allreduce.comm import init
    from allreduce.comm.transports import native

    native._ANNOUNCE_SECONDS = 9.0  # a wait returns to Python then: usually each second
    comm = init(transport="shared", timeout=20)
    x = comm.empty(1 << 20, "float32")
    comm.barrier()
    work = comm.all_reduce(x, out=x, async_op=True) if comm.rank == 0 else None
    if work is not None:
        thread = threading.Thread(target=work.wait)
        thread.start()
        time.sleep(0.3)
        ctypes.PyDLL(None).usleep(7_000_000)
        thread.join()
    else:
        time.sleep(1)  # the other rank's thread waits, and its main thread has the GIL
        comm.all_reduce(x, out=x, async_op=True).wait(timeout=4)


def test_a_native_wait_of_another_thread_than_the_main_one_needs_no_gil() -> None:
    """Until it returns to Python: docs/collectives.md says when."""
    results = run_ranks(_holds_the_gil, 2)
    assert not any(result.returncode for result in results), results
