"""Bounded staleness: a worker waits if it is too far ahead of the slowest one."""

from __future__ import annotations

from allreduce.parameters.clocks import Clocks


def test_a_worker_waits_for_the_slowest_that_computes() -> None:
    clocks = Clocks()
    clocks.tick("slow")
    clocks.tick("fast")
    clocks.tick("fast")
    clocks.tick("fast")
    assert clocks.wait("fast", 3, 0.0)
    assert not clocks.wait("fast", 2, 0.0)
    assert clocks.wait("slow", 0, 0.0)
    clocks.rest("slow")
    assert clocks.wait("fast", 0, 0.0)
    clocks.tick("slow")  # level with the others when it comes again
    assert clocks.wait("slow", 1, 0.0)
    assert not clocks.wait("slow", 0, 0.0)
