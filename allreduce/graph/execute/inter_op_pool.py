"""Run a frame's instructions on several threads, each as soon as its dependencies have ended."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue

from allreduce.graph.trace.replica import ThreadedRun

Step = Callable[[], None]


class _Helpers:
    """The process's pool threads and their queue of work."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Step] = SimpleQueue()
        self._starting = threading.RLock()  # a signal's handler may run a step meanwhile
        self._started = 0

    def start(self, count: int) -> None:
        """Start threads until there are `count`."""
        while self._started < count:
            with self._starting:
                if self._started < count:
                    threading.Thread(
                        target=_help, args=(self._asked,), name="allreduce-op", daemon=True
                    ).start()
                    self._started += 1

    def ask(self, work: Step) -> None:
        """Queue work for a pool thread, with the caller's context variables."""
        self._asked.put(partial(copy_context().run, work))


def _help(asked: SimpleQueue[Step]) -> None:
    while True:
        asked.get()()


_helpers = _Helpers()


def _after_fork() -> None:
    global _helpers
    _helpers = _Helpers()  # the threads are the parent's


os.register_at_fork(after_in_child=_after_fork)


class InterOpPool:
    """Runs instructions on a replica's own thread and on the process's pool threads.

    A run never waits for pool threads to become free. If they are busy with another replica, the
    replica's own thread runs all instructions.

    Args:
        after: For each instruction, the indices of those that must end before it.
        free: Whether any thread may run it; the others run on the replica's own thread.
        threads: The number of threads, including the replica's own.
        runs: The replica's runs that may not have ended.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        after: Sequence[frozenset[int]],
        free: Sequence[bool],
        threads: int,
        runs: list[ThreadedRun],
    ) -> None:
        self.steps, self.free, self.helpers, self._runs = steps, free, threads - 1, runs
        self.missing = [len(before) for before in after]
        self.then: list[list[int]] = [[] for _ in steps]
        for index, before in enumerate(after):
            for i in before:
                self.then[i].append(index)

    def run(self) -> None:
        """Run all instructions; raises the first error once no instruction runs any more."""
        _helpers.start(self.helpers)
        run = Run(self)
        self._runs.append(run)
        try:
            run.lead()
        finally:
            end(self._runs)


def end(runs: list[ThreadedRun]) -> None:
    """Wait until no pool thread runs an instruction of one of a replica's runs.

    Instructions write memory that the next step uses. A signal's handler may raise during this
    wait, however often it is repeated, so the next step waits again.
    """
    while runs:
        runs[-1].end()
        runs.pop()


class Run:
    """One run of all instructions.

    A signal's handler may raise anywhere in the replica's own thread. State shared with pool
    threads is guarded by primitives implemented in C, which leave no lock held.
    """

    def __init__(self, pool: InterOpPool) -> None:
        self._steps, self._free, self._then = pool.steps, pool.free, pool.then
        self._missing = list(pool.missing)
        self._most = pool.helpers  # at once
        self._lock = threading.Lock()
        self._own: list[int] = []  # heaps of ready steps: for the own thread, for any thread
        self._anybodys: list[int] = []
        self._news: SimpleQueue[None] = SimpleQueue()  # to the own thread: a helper has done one
        self._left = len(pool.steps)
        self._helping = 0  # helpers in the middle of a step
        self._error: BaseException | None = None
        self._over = False

    def lead(self) -> None:
        """Run instructions on the replica's own thread until all have ended."""
        with self._lock:
            for first in [i for i, count in enumerate(self._missing) if not count]:
                self._put(first)
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if not self._left:
                    return
                ready = self._own or self._anybodys
                index = heapq.heappop(ready) if ready else None
            if index is None:
                self._news.get()
                continue
            self._steps[index]()
            with self._lock:
                self._finish(index)

    def _put(self, index: int) -> None:
        if self._free[index]:
            heapq.heappush(self._anybodys, index)
            _helpers.ask(self._help)
        else:
            heapq.heappush(self._own, index)

    def _help(self) -> None:
        """Run instructions on a pool thread while any is ready."""
        while True:
            with self._lock:
                if self._over or not self._anybodys or self._helping == self._most:
                    return  # the own thread was first, or helpers come back to it
                index = heapq.heappop(self._anybodys)
                self._helping += 1
            self._take(index)

    def _take(self, index: int) -> None:
        error = None
        try:
            self._steps[index]()
        except BaseException as caught:
            error = caught
        with self._lock:
            self._helping -= 1
            if error is None:
                self._finish(index)
            else:
                self._error, self._over = self._error or error, True
        self._news.put(None)

    def _finish(self, index: int) -> None:
        self._left -= 1
        for following in self._then[index]:
            self._missing[following] -= 1
            if not self._missing[following]:
                self._put(following)

    def end(self) -> None:
        """Stop pool threads from starting instructions, and wait for running ones; repeatable."""
        with self._lock:
            self._over = True
        while self._helping:
            self._news.get()
