"""The way of a call to its transport: in its turn, and ended if a signal interrupts it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

from allreduce.comm import messages
from allreduce.comm.arguments import Prepared, prepare
from allreduce.comm.base import Transport, Work
from allreduce.comm.call import Call
from allreduce.comm.caller import Caller
from allreduce.comm.checks import Context, Options
from allreduce.comm.failures import group_text
from allreduce.comm.order import Order
from allreduce.comm.sites import place
from allreduce.comm.stages import Stages, of_one
from allreduce.errors import AllreduceError, ClosedError


class Calling(Caller):
    """What starts the calls of a communicator, which sets these attributes."""

    _name: str
    _where: str
    _transport: Transport
    _order: Order
    _quick: object  # read by native methods
    _closed: bool
    _here: threading.local  # `starts`: whether this thread's call is behind its checks

    def _admit(self) -> None:
        self._transport.admit()

    def _check_open(self) -> None:
        if self._closed:
            group = group_text(self._name)
            who = "the communicator that it came from" if group else "allreduce.init()"
            raise ClosedError(f"{self._where}: the communicator is closed; {who} makes a new one")

    def _finish_quick(self, work: object, x: Any) -> None:
        """Complete a call that the quick way left unfinished, or raise why it failed."""
        self._transport.finish_quick(work, x)

    def _interrupt_quick(self, kind: type[BaseException]) -> None:
        """End the communicator after a signal's handler raised in the middle of a quick call."""
        self._transport.abort(f"a collective was interrupted by {kind.__name__}")

    def _start(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Work:
        context = self._context(collective)
        ready = prepare(context, x, options, out, whole)
        start = self._transport.start
        return self._in_order(context, start, ready.call, ready.x, ready.out, ready.result)

    def _start_ready(self, context: Context, ready: Prepared) -> Work:
        start = self._transport.start
        return self._in_order(context, start, ready.call, ready.x, ready.out, ready.result)

    def _called(self, member: int) -> str:
        return self._transport.called(member)

    def _stage(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Work:
        context = self._calling(collective)  # also of one that close() waits for
        return self._begin(context, prepare(context, x, options, out, whole))

    def _staged(self, context: Context, stages: Stages, async_op: bool) -> Any:
        return self._call(functools.partial(self._queued, context, stages, async_op), async_op)

    def _queued(self, context: Context, stages: Stages, async_op: bool) -> Work:
        at = place()
        self._here.starts = True
        return self._order.add(stages, context.where, at, attended=async_op)

    def _call(self, begin: Callable[[], Work], async_op: bool) -> Any:
        work: Work | None = None
        self._here.starts = False
        try:
            work = begin()
            return work if async_op else work.wait()
        except AllreduceError:
            raise
        except BaseException as error:  # a signal's handler raised, and nobody goes on with it
            # Without a work it may have started, unless the caller's array raised it before that.
            of_array = isinstance(error, Exception) and not self._here.starts
            if of_array if work is None else work.settled:
                raise
            self._transport.abort(f"a call was interrupted by {type(error).__name__}")
            raise

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return self._order.together()

    def _send(self, x: Any, dest: int, tag: int) -> Work:
        context = self._context("send")
        return self._begin(context, messages.prepare_send(context, x, dest, tag))

    def _meet(self, typed: str = "") -> Work:
        context = self._context(typed.partition("(")[0] or "barrier")
        call = Call("barrier", None, "none", 0, None, self._name, typed=typed)
        return self._in_order(context, self._transport.start, call, None, None, lambda: None)

    def _receive(self, out: Any, source: int, tag: int) -> Work:
        context = self._context("recv")
        work = self._begin(context, messages.prepare_recv(context, out, source, tag))
        return messages.Receive(work)

    def _in_order(self, context: Context, start: Callable[..., Work], *arguments: Any) -> Work:
        """Start a collective, after the calls in stages that were made before."""
        self._here.starts = True
        order = self._order
        with order.lock:
            if order.queue:
                stages = of_one(functools.partial(start, *arguments))
                return order.add(stages, context.where, place(), attended=False)
            order.settle()
            work = start(*arguments)
        work.where = context.where
        return work

    def _begin(self, context: Context, ready: Prepared) -> Work:
        """Start a message, which has no place in the order, or what has its turn."""
        self._here.starts = True
        work = self._transport.start(ready.call, ready.x, ready.out, ready.result)
        work.where = context.where
        return work

    def _hold(self, held: bool) -> None:
        """Have quick calls take the way of all, while there are others to start before them."""
        self._quick = None if held or self._closed else self._transport.quick()
        if self._closed:  # meanwhile
            self._quick = None

    def _context(self, collective: str) -> Context:
        self._check_open()
        return self._calling(collective)

    def _calling(self, collective: str) -> Context:
        return Context(collective, self._where, self._name, self.rank, self.size)
