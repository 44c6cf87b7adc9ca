"""A call of several stages, as the work that its caller waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeAlias

from allreduce.comm.base import Work
from allreduce.comm.sites import Place, standing_at
from allreduce.errors import AllreduceError

if TYPE_CHECKING:
    from allreduce.comm.order import Order

# Yields each stage but the last, and is sent its result; returns the last stage, if there is one
# more, and what makes the call's result of its.
Stages: TypeAlias = Generator[Work, Any, tuple[Work | None, Callable[[Any], Any]]]


PIECE_BYTES = 4 << 20  # what a stage carries where the call is cut: from 2 MiB on no more is gained


class Staged(Work):
    """A call that is made of several, or that has to wait for its turn."""

    def __init__(self, order: Order, stages: Stages, where: str, place: Place) -> None:
        self.where = where
        self.stage: Work | None = None  # what is waited for before the next one can start
        self.started = False  # wholly, or it has failed
        self._order, self._stages, self._place = order, stages, place
        self._last: Work | None = None
        self._make: Callable[[Any], Any] = as_it_is
        self._error: BaseException | None = None

    def advance(self) -> bool:
        """Start what can be; returns whether nothing more is to start. Its turn has come."""
        if self.started:
            return True
        try:
            with standing_at(self._place):
                if self.stage is None:
                    self.stage = next(self._stages)
                # Who waits for it goes on; two that wait for each other would do so for ever.
                while not self.stage.awaited and self.stage.look():
                    self.stage = self._stages.send(self.stage.wait())
            return False
        except StopIteration as end:
            self._last, self._make = end.value
            self.started = True
        except AllreduceError as error:  # the others have the same, are told, or miss this member
            self.fail(error)
        return True

    def fail(self, error: BaseException) -> None:
        """Have its wait raise an error, and start nothing more of it."""
        if not self.started:
            self._error, self.started = error, True
            self._stages.close()

    @property
    def settled(self) -> bool:
        return self.started and (self._last is None or self._last.settled)

    def done(self) -> bool:
        if not self.started:  # what has started needs nobody's turn
            self._order.attend()
        if not self.started:
            self._order.ask()
        self.check()
        return self.started and (self._last is None or self._last.done())

    def finish(self, timeout: float | None) -> Any:
        until = None if timeout is None else time.monotonic() + timeout
        if not self.started:
            self._order.reach(self, until)
        self.check()
        return self._make(None if self._last is None else self._last.wait(left(until)))

    def check(self) -> None:
        """Raise why it has failed, if it has."""
        if self._error is not None:
            raise self._error


def of_one(begin: Callable[[], Work]) -> Stages:
    """Return the stages of a call that has one."""
    yield from ()
    return begin(), as_it_is


def as_it_is(value: Any) -> Any:
    """Return what the last stage gave."""
    return value


def left(until: float | None) -> float | None:
    """Return the seconds until then; None without it."""
    return None if until is None else max(0.0, until - time.monotonic())
