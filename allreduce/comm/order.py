"""When the calls of a communicator start, some of which are made of several.

A scatter first tells its array's kind, plain data its length, an all_to_all its counts. Something
else between two such stages, on one member and not on the others, would be a mismatch: so there is
nothing between them. What is called meanwhile, by any thread, starts when the last stage has. Who
waits for a call goes through the stages before it; where nobody does, a thread of ours.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from allreduce.comm import attendant
from allreduce.comm.base import SharedWaitError, Transport
from allreduce.comm.locks import owned, within
from allreduce.comm.sites import Place
from allreduce.comm.stages import Staged, Stages, left
from allreduce.errors import AllreduceError, ClosedError, TimeoutError, UsageError


class Order:
    """The calls of one member of a communicator that have not started yet, in their order.

    Args:
        transport: What they start on.
        hold: Is told whether there are such; of the communicator, which holds this.
    """

    def __init__(self, transport: Transport, hold: weakref.WeakMethod[Callable[[bool], None]]):
        self.lock = threading.RLock()  # held to start a call, by whoever it is
        self._held = 0  # by how many that start several
        self.queue: deque[Staged] = deque()
        self._transport, self._hold = transport, hold
        self.holding = False  # quick calls, as far as was said
        self._ended = False
        attendant.know(self)

    def add(self, stages: Stages, where: str, place: Place, attended: bool) -> Staged:
        """Start a call in stages when its turn comes.

        Args:
            stages: Its stages.
            where: Who calls what, for messages.
            place: The caller's line.
            attended: Whether it is to go on without anybody waiting for it.
        """
        self._transport.admit()
        work = Staged(self, stages, where, place)
        with self.lock, self._whole():
            self.queue.append(work)
            self._tell()
            self._start()
            if attended and self.queue:
                go_on = attendant.attend if self._transport.any_thread else attendant.leave_to_waits
                go_on(self)
        return work

    def advance(self) -> None:
        """Start what can be without waiting."""
        with self.lock:
            if self.queue:  # who must not call must not make another's call fail
                self._transport.admit()
            with self._whole():
                self._start()

    def _start(self) -> None:
        while self.queue and self.queue[0].advance():
            self.queue.popleft()
        self._tell()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Have no call lose its place among its stages, or in the queue, and be waited for."""
        try:
            yield
        except AllreduceError:
            raise
        except BaseException as error:  # a signal's handler raised; its own thread hears that
            reason = f"a start was interrupted by {type(error).__name__}"
            self._transport.abort(reason)
            for work in self.queue:
                ended = ClosedError(f"{work.where}: this member aborted the communicator: {reason}")
                ended.__cause__ = error
                work.fail(ended)
            raise

    @property
    def busy(self) -> bool:
        """Whether some have not started yet, and may do so."""
        return bool(self.queue) and not self._ended and not self._transport.dead

    def end(self) -> None:
        """Start nothing more without being asked: the communicator is closed."""
        self._ended = True

    def attend(self) -> None:
        """Advance, if no thread is about to, this one included, and this one may."""
        if not owned(self.lock):
            with contextlib.suppress(UsageError):  # of who must not call
                within(self.lock, 0.0, self.advance)

    def reach(self, work: Staged | None, until: float | None = None) -> None:
        """Wait until a call has started wholly, or without one until all have.

        Raises:
            AllreduceError: The communicator has failed in a stage.
        """
        found: list[Staged] = []  # the one that waits for a stage before this

        def look() -> None:
            self.advance()
            reached = not self.queue if work is None else work.started
            found[:] = [] if reached else [self.queue[0]]

        while True:
            if not within(self.lock, left(until), look):
                what = "the calls made before" if work is None else work.where
                raise TimeoutError(
                    f"{what}: another thread of this rank was in comm.empty(), or in a call of "
                    "several arrays, for as long as this wait was to last; wait longer, or make "
                    "calls from one thread"
                )
            if not found:
                return
            with self._told(found[0]):
                stage = found[0].stage
                assert stage is not None, "the first one waits for a stage"
                stage.wait(left(until))

    def ask(self) -> None:
        """Raise why the communicator has failed in a stage, if it has."""
        found: list[Staged] = []

        def look() -> None:
            self._transport.admit()
            found.extend(itertools.islice(self.queue, 1))

        within(self.lock, 0.0, look)  # who has it now finds out
        for head in found:
            if head.stage is not None:
                with self._told(head):
                    head.stage.done()

    @contextlib.contextmanager
    def _told(self, head: Staged) -> Iterator[None]:
        """Have the call that waits for a stage fail with the communicator."""
        try:
            yield
        except SharedWaitError:  # for another thread's wait
            raise
        except AllreduceError as error:
            with self.lock:
                head.fail(error)
            if isinstance(error, ClosedError):
                head.check()  # which may have heard the cause of it, from another thread
            raise

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let no other thread start a call meanwhile."""
        with self.lock:
            self._held += 1
            try:
                self._tell()
                yield
            finally:
                self._held -= 1
                self._tell()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """As `together`, when all that was called before has started."""
        self.reach(None)
        with self.together():
            while self.queue:  # of another thread, since
                self.reach(None)
            yield

    def _tell(self) -> None:
        """Have quick calls wait for their turn, too, where there are turns."""
        tell = self._hold()
        holds = bool(self.queue) or self._held > 0
        self.holding |= holds
        if tell is not None:
            tell(holds)
        self.holding = holds

    def settle(self) -> None:
        """Have quick calls go on after a signal's handler kept this from saying so; lock held."""
        if self.holding:
            self._tell()
