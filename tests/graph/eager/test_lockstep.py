"""Replicas that take turns end with their step, however it ends."""

from __future__ import annotations

import os
import time

import pytest

from allreduce.graph.eager.lockstep import Meet, run_in_lockstep


def test_replicas_that_never_had_their_turn_end_with_the_others() -> None:
    def fails(meet: Meet) -> None:
        raise ValueError("enough")

    def never(meet: Meet) -> None:
        raise AssertionError("it is not its turn")

    before = len(os.listdir("/proc/self/task"))
    for _ in range(100):
        with pytest.raises(ValueError, match="enough"):
            run_in_lockstep([fails, never, never, never])
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before
