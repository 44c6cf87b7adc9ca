"""Threads that run the steps of a frame, each as soon as what it needs is there."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

Step = Callable[[], None]


class _Helpers:
    """The process's helpers, and what they are to do."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Step] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def ask(self, work: Step, count: int) -> None:
        """Have `count` threads do some work as soon as they can."""
        while len(self._threads) < count:
            asked = self.asked
            thread = threading.Thread(target=_help, args=(asked,), name="allreduce-op", daemon=True)
            thread.start()
            self._threads.append(thread)
        for _ in range(count):
            self.asked.put(work)


def _help(asked: SimpleQueue[Step]) -> None:
    while True:
        asked.get()()


_helpers = _Helpers()


def _after_fork() -> None:
    global _helpers
    _helpers = _Helpers()  # the threads are the parent's


os.register_at_fork(after_in_child=_after_fork)


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
        self._steps, self._free, self._count = steps, free, threads - 1
        self._missing = [len(before) for before in after]
        self._then: list[list[int]] = [[] for _ in steps]
        for index, before in enumerate(after):
            for i in before:
                self._then[i].append(index)

    def run(self) -> None:
        """Run all steps; raises what one of them has raised, when none runs any more."""
        run = _Run(self._steps, self._free, list(self._missing), self._then)
        failure: BaseException | None = None
        try:
            _helpers.ask(run.help, self._count)
            run.lead()
        finally:
            # What a helper is in the middle of writes into memory that the next step uses: however
            # often a signal's handler raises here, nobody leaves before it is over.
            while not run.ended:
                try:
                    run.end(self._count)
                except BaseException as error:
                    failure = error
            if failure is not None:
                raise failure


class _Run:
    """One time through all steps.

    A signal's handler may raise anywhere in the own thread. What it shares with helpers is locked
    in C only, where that leaves no lock held: conditions are Python.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        free: Sequence[bool],
        missing: list[int],
        then: Sequence[Sequence[int]],
    ) -> None:
        self._steps, self._free, self._missing, self._then = steps, free, missing, then
        self._lock = threading.Lock()
        self._own: list[int] = []  # heaps of steps that are ready: for the own thread, for anybody
        self._anybodys: list[int] = []
        self._offers: SimpleQueue[bool] = SimpleQueue()  # to helpers: a step, or the end
        self._news: SimpleQueue[None] = SimpleQueue()  # to the own thread: a helper has done one
        self._left = len(steps)
        self._helping = 0  # helpers in the middle of a step
        self._error: BaseException | None = None
        self._over = False
        self._dismissed = 0  # helpers that will hear of the end
        self.ended = False
        for index, count in enumerate(missing):
            if not count:
                self._put(index)

    def _put(self, index: int) -> None:
        if self._free[index]:
            heapq.heappush(self._anybodys, index)
            self._offers.put(True)
        else:
            heapq.heappush(self._own, index)

    def lead(self) -> None:
        """Run steps until all are over, as the replica's own thread."""
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

    def help(self) -> None:
        """Run steps that any thread may run, until there are none left."""
        with np.errstate(all="ignore"):
            while self._offers.get():
                with self._lock:
                    if self._over:
                        return
                    if not self._anybodys:  # the own thread was first
                        continue
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

    def end(self, helpers: int) -> None:
        """Have helpers start nothing any more, and wait for what they run; it can be repeated."""
        with self._lock:
            self._over = True
        while self._dismissed < helpers:
            self._offers.put(False)
            self._dismissed += 1
        while self._helping:
            self._news.get()
        self.ended = True
