"""Threads of replicas do their parts at once, and are gone with who asked them to."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.errors import UsageError
from allreduce.graph.core import op_table
from allreduce.graph.replicate import threads as threads_module
from allreduce.graph.replicate.threads import Threads


def test_each_does_its_part_at_the_same_time_and_all_end_with_their_owner() -> None:
    together = threading.Barrier(3, timeout=25)
    threads = Threads(3)
    for _ in range(2):
        found = threads.do(lambda index: (index, together.wait(), threading.current_thread()))
        assert [index for index, _, _ in found] == [0, 1, 2]
        assert sorted(arrived for _, arrived, _ in found) == [0, 1, 2]
        assert not threads.busy
    del threads
    for _, _, each in found:
        each.join(25)
        assert not each.is_alive()


def test_a_call_that_has_returned_keeps_nothing_alive() -> None:
    threads, before = Threads(2), sys.getswitchinterval()

    class Work:
        def __call__(self, index: int) -> None:
            pass

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(2000):
            threads.do(work := Work())
            kept = weakref.ref(work)
            del work
            assert kept() is None
    finally:
        sys.setswitchinterval(before)


_armed = threading.Event()  # the handler is to raise, once


class _InterruptError(Exception):
    """What the test's handler raises."""


@pytest.fixture
def _handler() -> Iterator[None]:
    def handler(_: int, frame: FrameType | None) -> None:
        in_threads = frame is not None and frame.f_code.co_filename == threads_module.__file__
        if in_threads and _armed.is_set():
            _armed.clear()
            raise _InterruptError

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_handler")
def test_they_are_waited_for_however_often_that_is_interrupted() -> None:
    main, waits, over = threading.get_ident(), threading.Semaphore(0), [False, False]
    threads = Threads(2)

    def work(index: int) -> None:
        for _ in range(3 if index == 0 else 0):
            assert waits.acquire(timeout=25)
            _armed.set()
            deadline = time.monotonic() + 25
            while _armed.is_set() and time.monotonic() < deadline:  # until it waits for them
                signal.pthread_kill(main, signal.SIGUSR1)
                time.sleep(0.05)
        if index == 0:
            assert waits.acquire(timeout=25)
            time.sleep(0.05)  # it waits by now
        over[index] = True

    for wait in (lambda: threads.do(work), threads.end, threads.end):
        waits.release()
        with pytest.raises(_InterruptError):
            wait()
        assert threads.busy
        assert not over[0]
    waits.release()
    threads.end()
    assert over == [True, True]


def _child(do: Callable[[], None]) -> int:
    """Call something in a child made by fork; returns how that ended."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            do()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_can_close(tmp_path: Path) -> None:
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x: Any) -> Any:
        return ar.all_reduce(x)

    def child() -> None:
        for eagerly in (False, True):
            with pytest.raises(UsageError, match="forked from the process whose replicas these"):
                strategy.run(step, (np.ones(2),), eagerly=eagerly)
        strategy.close()

    for _ in range(2):
        values = strategy.run(step, (np.ones(2),)).values
        np.testing.assert_array_equal(values, [[2.0, 2.0]] * 2)
        assert _child(child) == 0
    strategy.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_current", options.Options())
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))
    ar.config.threading.set_inter_op_parallelism_threads(2)
    seen: set[int] = set()
    both = threading.Barrier(2)

    def kernel(out: np.ndarray, inputs: Any, attrs: object) -> None:
        both.wait(timeout=25)
        seen.add(threading.get_native_id())
        out[...] = inputs[0]

    one, other = (
        ar.register_op(f"forked_{i}", shape=lambda specs, attrs: specs[0], cpu=kernel)
        for i in range(2)
    )
    step = ar.function(lambda x: one(x) + other(x))

    def run() -> None:
        np.testing.assert_array_equal(np.asarray(step(np.ones(2))), [2.0, 2.0])

    run()
    assert len(seen) == 2
    assert _child(run) == 0
