"""The threads of a process's replicas, which run their parts of a step concurrently."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from allreduce.errors import UsageError

Work = Callable[[int], Any]


class Threads:
    """One thread for each replica of this process.

    A signal's handler may raise anywhere in the calling thread, and could leave the Python locks of
    futures and conditions locked. Shared state is therefore guarded by primitives implemented in C.
    """

    def __init__(self, count: int) -> None:
        self._asked: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(count)]
        self._done: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._busy = False
        self._process = os.getpid()
        # A thread releases its lock when it ends. An interrupted `join` takes one for ended that is
        # not (Python 3.11, Thread._wait_for_tstate_lock).
        self._alive = [threading.Lock() for _ in range(count)]
        for each in self._alive:
            each.acquire()
        # They refer only to queues and locks, so that only users keep this object alive.
        threads = [
            threading.Thread(
                target=_live,
                args=(index, asked, self._done, self._alive[index]),
                name=f"allreduce-replica_{index}",
                daemon=True,
            )
            for index, asked in enumerate(self._asked)
        ]
        weakref.finalize(self, _dismiss, self._asked).atexit = False
        for thread in threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether threads may still run: no caller has waited for all of them."""
        return self._busy

    @property
    def _inherited(self) -> bool:
        return os.getpid() != self._process

    def do(self, work: Work) -> list[Any]:
        """Call `work(index)` in each thread, in the caller's context; it must not raise.

        Returns:
            The results.
        """
        if self._inherited:
            raise UsageError(
                f"process {os.getpid()} was forked from the process whose replicas these are, and "
                "cannot run their steps"
            )
        self._busy = True
        for asked in self._asked:
            asked.put(_in_context(work))
        results = dict(self._done.get() for _ in self._asked)
        self._busy = False
        return [results[index] for index in range(len(self._asked))]

    def end(self) -> None:
        """End the threads after their current work, and wait for them."""
        if self._inherited:  # the parent's process has them, and this one nothing to wait for
            return
        _dismiss(self._asked)
        for each in self._alive:
            with each:
                pass


def _live(
    index: int,
    asked: SimpleQueue[Work | None],
    done: SimpleQueue[tuple[int, Any]],
    alive: threading.Lock,
) -> None:
    while (work := asked.get()) is not None:
        answer = [(index, work(index))]
        del work  # before the caller goes on: this thread keeps nothing of it alive
        done.put(answer.pop())
    alive.release()


def _in_context(work: Work) -> Work:
    context = copy_context()  # one thread alone can be in it
    return lambda index: context.run(work, index)


def _dismiss(queues: Sequence[SimpleQueue[Work | None]]) -> None:
    for asked in queues:
        asked.put(None)
