"""The progress of started calls while their member does not wait for them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from allreduce.comm import replica_communicators
from allreduce.comm.core import progress
from allreduce.events import logger
from tests.harness import world_of_one


def test_a_look_takes_all_steps_that_can_be_taken() -> None:
    comms = replica_communicators(world_of_one(), 2, name="engine", timeout=10)
    works = [comm.all_reduce(np.ones(2_000_000, "f4"), async_op=True) for comm in comms]
    looks = 0
    while not all(work.settled for work in works):  # which takes hundreds of steps
        progress.make_progress()
        looks += 1
        assert looks <= 50
    assert all((work.wait() == 2).all() for work in works)
    for comm in comms:
        comm.close()


def test_calls_go_on_in_a_thread_while_this_one_waits_for_something_else() -> None:
    comms = replica_communicators(world_of_one(), 2, name="engine", timeout=10)
    with progress.background_progress():
        works = [comm.all_reduce(np.ones(2_000_000, "f4"), async_op=True) for comm in comms]
        end = time.monotonic() + 25
        while not all(work.settled for work in works) and time.monotonic() < end:
            time.sleep(0.001)
        assert all(work.settled for work in works)
        (thread,) = progress._helpers
    thread.join(25)
    assert not thread.is_alive()
    assert not progress._helpers
    for comm in comms:
        comm.close()


def test_without_a_thread_more_it_says_that_calls_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    comms = replica_communicators(world_of_one(), 1, name="engine", timeout=10)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("WARNING"), progress.background_progress():
        pass
    monkeypatch.undo()
    assert "calls in flight make no progress here" in caplog.text
    comms[0].close()
