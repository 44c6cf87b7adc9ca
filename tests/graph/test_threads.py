"""Threads of replicas do their parts at once, and are gone with who asked them to."""

from __future__ import annotations

import threading

from allreduce.graph.threads import Threads


def test_each_does_its_part_at_the_same_time_and_all_end_with_their_owner() -> None:
    together = threading.Barrier(3, timeout=10)
    threads = Threads(3)
    for _ in range(2):
        found = threads.do(lambda index: (index, together.wait(), threading.current_thread()))
        assert [index for index, _, _ in found] == [0, 1, 2]
        assert sorted(arrived for _, arrived, _ in found) == [0, 1, 2]
        assert not threads.busy
    del threads
    for _, _, each in found:
        each.join(10)
        assert not each.is_alive()
