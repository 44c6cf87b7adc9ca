"""Threads that run the steps of a frame, each as soon as what it needs is there."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue

Step = Callable[[], None]


class _Helpers:
    """The process's helpers, and what they are to do."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Step] = SimpleQueue()
        self._starting = threading.RLock()  # a signal's handler may run a step meanwhile
        self._started = 0

    def start(self, count: int) -> None:
        """See to it that there are as many."""
        while self._started < count:
            with self._starting:
                if self._started < count:
                    threading.Thread(
                        target=_help, args=(self._asked,), name="allreduce-op", daemon=True
                    ).start()
                    self._started += 1

    def ask(self, work: Step) -> None:
        """Have one do some work as soon as it can, with the caller's context variables."""
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
    """A replica's own thread, and others that help it with steps that any thread may run.

    The helpers are the process's. Nothing waits for them to come: where they are busy with another
    replica, its own thread runs all steps.

    Args:
        steps: What to run.
        after: For each step those that have to be over before it.
        free: Whether any thread may run it; the others run on the replica's own.
        threads: How many there are, with the replica's own.
        runs: The replica's times through steps that may not have ended.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        after: Sequence[frozenset[int]],
        free: Sequence[bool],
        threads: int,
        runs: list[Run],
    ) -> None:
        self._steps, self._free, self._most, self._runs = steps, free, threads - 1, runs
        self._missing = [len(before) for before in after]
        self._then: list[list[int]] = [[] for _ in steps]
        for index, before in enumerate(after):
            for i in before:
                self._then[i].append(index)

    def run(self) -> None:
        """Run all steps; raises what one of them has raised, when none runs any more."""
        _helpers.start(self._most)
        run = Run(self._steps, self._free, self._most, list(self._missing), self._then)
        self._runs.append(run)
        try:
            run.lead()
        finally:
            end(self._runs)


def end(runs: list[Run]) -> None:
    """Wait until no helper is in the middle of one of a replica's times through steps.

    What it writes is memory that the next step uses. A signal's handler that raises may come in
    between, how often it may be tried: so the next step waits, too.
    """
    while runs:
        runs[-1].end()
        runs.pop()


class Run:
    """One time through all steps.

    A signal's handler may raise anywhere in the own thread. What it shares with helpers is locked
    in C only, where that leaves no lock held: conditions are Python.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        free: Sequence[bool],
        most: int,
        missing: list[int],
        then: Sequence[Sequence[int]],
    ) -> None:
        self._steps, self._free, self._missing, self._then = steps, free, missing, then
        self._most = most  # helpers at once
        self._lock = threading.Lock()
        self._own: list[int] = []  # heaps of steps that are ready: for the own thread, for anybody
        self._anybodys: list[int] = []
        self._news: SimpleQueue[None] = SimpleQueue()  # to the own thread: a helper has done one
        self._left = len(steps)
        self._helping = 0  # helpers in the middle of a step
        self._error: BaseException | None = None
        self._over = False

    def lead(self) -> None:
        """Run steps until all are over, as the replica's own thread."""
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
        """Run steps that any thread may run, as long as there are some."""
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
        """Have helpers start nothing any more, and wait for what they run; it can be repeated."""
        with self._lock:
            self._over = True
        while self._helping:
            self._news.get()
