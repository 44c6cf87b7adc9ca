"""Other threads and signal handlers in the middle of a call damage no array."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
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
                [comm.all_reduce(x, async_op=True).wait() for _ in range(2)]
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

    assert run_threads(call, 2) == ["aborted", "told"]
    assert handled


def test_a_member_leaves_though_its_close_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(comm: Communicator) -> str:
        if comm.rank == 1:
            with pytest.raises(PeerLostError, match="left normally"):
                comm.recv(np.ones(3), source=0)
            return "told"
        me, settled = threading.current_thread(), NativeWork.settled

        def interrupt(work: NativeWork[Any]) -> Any:
            if threading.current_thread() is me:
                raise KeyboardInterrupt
            return settled.__get__(work)

        comm.all_reduce(np.ones(COUNT), async_op=True)
        with monkeypatch.context() as patch:
            patch.setattr(NativeWork, "settled", property(interrupt))
            with pytest.raises(KeyboardInterrupt):
                comm.close()
        return "left"

    assert run_threads(call, 2) == ["left", "told"]


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


def _holds_the_gil(folder: str) -> None:
    """Have the GIL in rank 0 until rank 1 has completed the call that a thread waits for."""
    import ctypes
    import os
    import threading
    import time

    from allreduce.comm import init
    from allreduce.comm.transports import native
    from allreduce.comm.transports.native import NativeTransport

    # A wait returns to Python then: usually each second.
    native._ANNOUNCE_SECONDS = native.WARN_SECONDS = 50.0
    comm = init(transport="shared", timeout=120)
    x = comm.empty(1 << 20, "float32")
    comm.barrier()
    if comm.rank == 1:
        done = os.open(f"{folder}/done", os.O_WRONLY)
        os.read(os.open(f"{folder}/held", os.O_RDONLY), 1)
        comm.all_reduce(x, out=x, async_op=True).wait(timeout=25)
        os.write(done, b"x")
        return
    waits, wait_for = threading.Event(), NativeTransport.wait_for

    def waiting(*given: object) -> bool:
        waits.set()
        return wait_for(*given)  # type: ignore[arg-type, type-var]

    NativeTransport.wait_for = waiting  # type: ignore[method-assign, assignment]
    work = comm.all_reduce(x, out=x, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    assert waits.wait(25)
    time.sleep(0.3)
    done = os.open(f"{folder}/done", os.O_RDONLY)
    os.write(os.open(f"{folder}/held", os.O_WRONLY), b"x")
    ctypes.PyDLL(None).read(done, ctypes.create_string_buffer(1), 1)
    thread.join()


def test_a_native_wait_of_another_thread_than_the_main_one_needs_no_gil(tmp_path: Path) -> None:
    """Until it returns to Python: docs/collectives.md says when."""
    for name in ("held", "done"):
        os.mkfifo(tmp_path / name)
    results = run_ranks(_holds_the_gil, 2, arguments=(str(tmp_path),))
    assert not any(result.returncode for result in results), results
