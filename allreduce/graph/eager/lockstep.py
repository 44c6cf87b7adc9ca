"""Run the replicas' Python code in lockstep: one at a time, up to the next joint operation.

Output of replicas does not mix, and a debugger can stop one while the others wait. A single
replica needs no thread.
"""

from __future__ import annotations

import _thread
import contextvars
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from allreduce.errors import MismatchError
from allreduce.graph.core.scope import take_along


@dataclass(frozen=True, slots=True)
class Meeting:
    """A joint operation of all replicas at one point of a step.

    Attributes:
        what: A description.
        key: Equal for all replicas at the same point.
        work: Takes all replicas' inputs, in order, and returns a result for each.
    """

    what: str
    source: str
    key: Any
    brought: Any
    work: Callable[[list[Any]], Sequence[Any]]


Meet = Callable[[Meeting], Any]


def run_in_lockstep(replicas: Sequence[Callable[[Meet], Any]]) -> list[Any]:
    """Run all replicas; return their results.

    Raises:
        MismatchError: Replicas of this process went different ways.
        Exception: The first one that a replica raised; the others end where they wait.
    """
    if len(replicas) == 1:
        return [replicas[0](_alone)]
    actors = [_Actor(replica) for replica in replicas]
    answers: list[Any] = [None] * len(actors)
    try:
        for actor in actors:
            actor.start()
        while True:
            pairs = zip(actors, answers, strict=True)
            reached = [actor.play(answer) for actor, answer in pairs]
            if all(isinstance(each, _Ended) for each in reached):
                return [each.value for each in reached]
            answers = list(_act(reached))
    finally:
        for actor in actors:
            actor.stop()
        # They know the error, and its traceback this frame: all would wait for the collector.
        actors.clear()
        answers.clear()


def _alone(meeting: Meeting) -> Any:
    (result,) = meeting.work([meeting.brought])
    return result


def _act(reached: Sequence[Any]) -> Sequence[Any]:
    """Run the operation that the replicas met for; every replica raises its error."""
    try:
        _check_same(reached)
        results: Sequence[Any] = reached[0].work([each.brought for each in reached])
        return results
    except Exception as error:
        return [_Raised(error)] * len(reached)


def _check_same(reached: Sequence[Any]) -> None:
    for index, each in enumerate(reached):
        if each.key != reached[0].key:
            raise MismatchError(
                f"replica 0 of this process came to {_where(reached[0])}, but replica {index} to "
                f"{_where(each)}; all replicas take part in changes of variables and in "
                "collectives, so branch only on values that are equal on all of them"
            )


def _where(reached: Any) -> str:
    return f"{reached.what} at {reached.source}" if reached.source else str(reached.what)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A replica has reached the end of the step."""

    value: Any
    what: str = "the end of the step"
    source: str = ""
    key: Hashable = "end"


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


class _Stopped(BaseException):
    """Ends a replica whose step is over; not an Exception, so that `except Exception` passes it."""


class _Actor:
    """One replica's Python code, in a thread that runs only in its turn.

    A signal's handler may raise anywhere in the calling thread. `Thread.start` waits for an event,
    whose Python lock could stay locked then, so this thread is started in C.
    """

    def __init__(self, replica: Callable[[Meet], Any]) -> None:
        self._replica = replica
        self._to = SimpleQueue[Any]()
        self._from = SimpleQueue[Any]()
        self._over = False
        self._reached: Any = None
        self._settle = take_along()
        self._ended = SimpleQueue[None]()
        self._began = False

    def start(self) -> None:
        """Start the thread, which waits for its first turn."""
        # With the caller's context variables, as NumPy's error state is one.
        _thread.start_new_thread(contextvars.copy_context().run, (self._live,))

    def play(self, answer: Any) -> Any:
        """Run the replica up to its next joint operation or its end; raises its error."""
        if not isinstance(self._reached, _Ended):
            self._to.put(answer)
            self._reached = self._from.get()
        if isinstance(self._reached, _Raised):
            raise self._reached.error
        return self._reached

    def stop(self) -> None:
        """End the replica where it waits, and wait for its thread."""
        self._over = True
        self._to.put(_Raised(_Stopped()))
        self._reached = None  # it may hold the error, as may queues that are no longer read
        if self._began:  # else it finds out when it does
            self._ended.get()
            self._to, self._from = SimpleQueue(), SimpleQueue()

    def _live(self) -> None:
        self._began = True
        ended = self._ended
        try:
            self._settle()
            self._wait()
            self._from.put(_Ended(self._replica(self._meet)))
        except BaseException as error:
            self._from.put(_Raised(error))
        finally:
            ended.put(None)

    def _meet(self, meeting: Meeting) -> Any:
        if self._over:  # in a `finally` of the user's
            raise _Stopped
        self._from.put(meeting)
        return self._wait()

    def _wait(self) -> Any:
        answer = self._to.get()
        if isinstance(answer, _Raised):
            try:
                raise answer.error
            finally:
                del answer  # whose traceback holds this frame
        return answer
