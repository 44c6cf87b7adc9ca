"""Ranks that are stopped, by a signal or a debugger, which look like ranks that are at work."""

from __future__ import annotations

from collections.abc import Sequence

from allreduce.cluster.host.machine import STOPPED, process_state
from allreduce.cluster.process.children import Child


class Stopped:
    """What is to be told of the ranks of a job that are stopped.

    Args:
        children: Their processes.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._seen = self._told = ""

    def news(self) -> str:
        """Look; returns who is waited for, if the last look found the same, and it is not told."""
        living = [child for child in self._children if child.code is None]
        states = [(child.rank, process_state(child.pid)) for child in living]
        found = ", ".join(f"rank {rank} ({state})" for rank, state in states if STOPPED in state)
        settled, self._seen = found == self._seen, found
        if not settled or found == self._told:
            return ""
        self._told = found
        return found and f"waiting for {found}"
