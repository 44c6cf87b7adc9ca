"""Threads that stand by for a process's replicas, and do their parts of a step at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Work = Callable[[int], Any]


class Threads:
    """One thread for each replica of this process.

    A signal's handler may raise anywhere in the thread that asks. Futures and conditions, which are
    Python, can stay locked for ever then; what these threads share with it is locked in C only.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self._asked: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(count)]
        self._done: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._live, args=(index,), name=f"allreduce-replica_{index}", daemon=True
            )
            for index in range(count)
        ]
        self._busy = False
        for each in self._threads:
            each.start()

    @property
    def busy(self) -> bool:
        """Whether they may be in the middle of something: nobody has waited for all of them."""
        return self._busy

    def do(self, work: Work) -> list[Any]:
        """Call `work(index)` in each; returns what they returned. It must not raise."""
        self._busy = True
        for queue in self._asked:
            queue.put(work)
        results = dict(self._done.get() for _ in self._asked)
        self._busy = False
        return [results[index] for index in range(len(self._asked))]

    def end(self) -> None:
        """End them, and wait for that: each does first what it was asked for."""
        for queue in self._asked:
            queue.put(None)
        for each in self._threads:
            each.join()

    def _live(self, index: int) -> None:
        while (work := self._asked[index].get()) is not None:
            self._done.put((index, work(index)))
