"""Threads that run the steps of a frame, each as soon as what it needs is there."""

from __future__ import annotations

import functools
import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

Step = Callable[[], None]


@functools.lru_cache(maxsize=1)
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "allreduce-op")


class Team:
    """A replica's own thread, and others that help it with steps that any thread may run.

    The helpers are the process's. Nothing waits for them to come: where they are busy with another
    replica, its own thread runs all steps.

    Args:
        steps: What to run.
        after: For each step those that have to be over before it.
        free: Whether any thread may run it; the others run on the replica's own.
        threads: How many there are, with the replica's own.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        after: Sequence[frozenset[int]],
        free: Sequence[bool],
        threads: int,
    ) -> None:
        self._steps, self._free, self._threads = steps, free, threads
        self._missing = [len(before) for before in after]
        self._then: list[list[int]] = [[] for _ in steps]
        for index, before in enumerate(after):
            for i in before:
                self._then[i].append(index)

    def run(self) -> None:
        """Run all steps; raises what the first of them to fail has raised, when none runs."""
        run = _Run(self._steps, self._free, list(self._missing), self._then)
        for _ in range(self._threads - 1):
            _helpers(self._threads - 1).submit(run.help)
        try:
            run.lead()
        finally:
            run.end()


class _Run:
    """One time through all steps."""

    def __init__(
        self,
        steps: Sequence[Step],
        free: Sequence[bool],
        missing: list[int],
        then: Sequence[Sequence[int]],
    ) -> None:
        self._steps, self._free, self._missing, self._then = steps, free, missing, then
        self._changed = threading.Condition()
        self._ready: tuple[list[int], list[int]] = ([], [])  # the own thread's, and anybody's
        self._left = len(steps)
        self._helping = 0  # steps that helpers run
        self._error: BaseException | None = None
        self._over = False
        for index, count in enumerate(missing):
            if not count:
                self._put(index)

    def _put(self, index: int) -> None:
        heapq.heappush(self._ready[self._free[index]], index)

    def lead(self) -> None:
        """Run steps until all are over, as the replica's own thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(self._ready) or self._error or not self._left)
                if self._error is not None:
                    raise self._error
                if not self._left:
                    return
                index = heapq.heappop(self._ready[0] or self._ready[1])
            self._steps[index]()
            self._finish(index)

    def help(self) -> None:
        """Run steps that any thread may run, until there are none left."""
        with np.errstate(all="ignore"):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ready[1] or self._over)
                    if self._over:
                        return
                    index = heapq.heappop(self._ready[1])
                    self._helping += 1
                try:
                    self._steps[index]()
                except BaseException as error:
                    self._fail(error)
                else:
                    self._finish(index)
                finally:
                    with self._changed:
                        self._helping -= 1
                        self._changed.notify_all()

    def _finish(self, index: int) -> None:
        with self._changed:
            self._left -= 1
            for following in self._then[index]:
                self._missing[following] -= 1
                if not self._missing[following]:
                    self._put(following)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._over = True

    def end(self) -> None:
        """Have helpers start nothing any more, and wait for what they run."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._helping)
