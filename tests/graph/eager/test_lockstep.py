"""Replicas that take turns end with their step, however it ends."""

from __future__ import annotations

import os
import threading
import time

import pytest

from allreduce.graph.eager import lockstep
from allreduce.graph.eager.lockstep import Meet, run_in_lockstep


def test_replicas_that_never_had_their_turn_end_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began: list[int] = []  # of their threads, which are Python's bare ones
    live = lockstep._Actor._live

    def noted(self: lockstep._Actor) -> None:
        began.append(threading.get_native_id())
        live(self)

    def fails(meet: Meet) -> None:
        raise ValueError("enough")

    def never(meet: Meet) -> None:
        raise AssertionError("it is not its turn")

    def last() -> set[int]:
        """Return those that run; others of the process may come and go."""
        return {*began} & {*map(int, os.listdir("/proc/self/task"))}

    monkeypatch.setattr(lockstep._Actor, "_live", noted)
    for _ in range(100):
        with pytest.raises(ValueError, match="enough"):
            run_in_lockstep([fails, never, never, never])
    until = time.monotonic() + 25
    while (len(began) < 400 or last()) and time.monotonic() < until:
        time.sleep(0.01)
    assert (len(began), last()) == (400, set())
