"""How one member of a communicator starts its calls: in one order for all of its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from allreduce.comm import messages
from allreduce.comm.arguments import Prepared, prepare
from allreduce.comm.base import Transport, Work
from allreduce.comm.call import Call
from allreduce.comm.checks import Context, Options
from allreduce.comm.failures import group_text
from allreduce.errors import AllreduceError, ClosedError, UnsupportedError

if TYPE_CHECKING:
    from allreduce.comm.home import Home

T = TypeVar("T")

_IN_A_THREAD = (
    "call it in another thread, with a communicator of its own (comm.split) if this one is used "
    "meanwhile"
)


class Caller:
    """One member, as its calls see it."""

    _home: Home | None = None  # set by what opened the communicator

    def __init__(
        self, transport: Transport, *, name: str, label: str, rank: int, size: int
    ) -> None:
        self.rank = rank
        self.size = size
        self._name = name
        self._where = f"[{transport.name}] {group_text(name)}{label}"
        self._transport = transport
        self._quick = transport.quick()  # read by native methods
        self._closed = False
        self._here = threading.local()  # `starts`: whether this thread's call is behind its checks
        # Held to start a call, or to make several without another thread's call between them.
        self._lock = threading.RLock()

    def _admit(self) -> None:
        """Refuse processes and threads that must not use this."""
        self._transport.admit()

    def _check_open(self) -> None:
        """Raise if the communicator was closed."""
        if self._closed:
            group = group_text(self._name)
            who = "the communicator that it came from" if group else "allreduce.init()"
            raise ClosedError(f"{self._where}: the communicator is closed; {who} makes a new one")

    def _context(self, collective: str) -> Context:
        """Return who is calling what; refuses a closed communicator."""
        self._check_open()
        return Context(collective, self._where, self._name, self.rank, self.size)

    def _called(self, member: int) -> str:
        """Name a member as people know it: "rank 7 (member 2)"."""
        return self._transport.called(member)

    def _call(self, begin: Callable[[], Work], async_op: bool) -> Any:
        """Start a call, and wait for it if not `async_op`.

        If a signal's handler interrupts it, the communicator is aborted: the call must not write to
        the caller's arrays later.
        """
        work: Work | None = None
        self._here.starts = False
        try:
            work = begin()
            return work if async_op else work.wait()
        except AllreduceError:
            raise
        except BaseException as error:
            self._interrupted(error, work)
            raise

    def _compound(
        self,
        context: Context,
        calls: Callable[[], T],
        async_op: bool = False,
        instead: str = _IN_A_THREAD,
    ) -> T:
        """Make a call that consists of several, one after the other.

        Args:
            context: Who is calling what.
            calls: Makes them, and waits for each.
            async_op: Whether the caller has asked for a `Work`.
            instead: What to do for that.

        Raises:
            UnsupportedError: The caller has asked for a `Work`.
        """
        if async_op:
            raise UnsupportedError(
                f"{context.where} consists of several calls, each of which needs the result of the "
                f"one before it, and cannot be asynchronous; {instead}"
            )
        self._here.starts = False
        try:
            return self._together(calls)
        except AllreduceError:
            raise
        except BaseException as error:
            self._interrupted(error, None)
            raise

    def _interrupted(self, error: BaseException, work: Work | None) -> None:
        """Abort after a signal's handler has raised, unless the call is complete.

        Without a work the call may have started, unless the caller's array raised before that.
        """
        of_array = isinstance(error, Exception) and not self._here.starts
        if not (of_array if work is None else work.settled):
            self._transport.abort(f"a call was interrupted by {type(error).__name__}")

    def _together(self, calls: Callable[[], T]) -> T:
        """Let no other thread start a call meanwhile, not by the quick way either.

        This is no context manager: one whose exit a signal's handler interrupts keeps the lock.
        """
        self._transport.admit()  # in a child made by fork nobody may release the lock
        with self._lock:
            before, self._quick = self._quick, None
            try:
                return calls()
            finally:
                self._quick = before
                if self._closed:  # meanwhile
                    self._quick = None

    def _start(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Work:
        """Check and start a call; the arguments are those of `prepare`."""
        context = self._context(collective)
        return self._start_ready(context, prepare(context, x, options, out, whole))

    def _start_ready(self, context: Context, ready: Prepared) -> Work:
        """Start a call that has been checked."""
        start = self._transport.start
        return self._in_order(context, start, ready.call, ready.x, ready.out, ready.result)

    def _next(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Any:
        """Make one of the calls of a compound one, and return its result.

        It is made also if another thread has called `close()`, which waits for the compound call.
        """
        context = Context(collective, self._where, self._name, self.rank, self.size)
        return self._start_ready(context, prepare(context, x, options, out, whole)).wait()

    def _meet(self, typed: str = "") -> Work:
        """Start a barrier whose text must be equal on all members."""
        context = self._context(typed.partition("(")[0] or "barrier")
        call = Call("barrier", None, "none", 0, None, self._name, typed=typed)
        return self._in_order(context, self._transport.start, call, None, None, lambda: None)

    def _in_order(self, context: Context, start: Callable[..., Work], *arguments: Any) -> Work:
        """Start a collective, when no other thread makes calls that belong together."""
        self._transport.admit()  # in a child made by fork nobody may release the lock
        self._here.starts = True
        with self._lock:
            work = start(*arguments)
        work.where = context.where
        return work

    def _send(self, x: Any, dest: int, tag: int) -> Work:
        """Check and start a send."""
        context = self._context("send")
        return self._begin(context, messages.prepare_send(context, x, dest, tag))

    def _receive(self, out: Any, source: int, tag: int) -> Work:
        """Check and start a recv."""
        context = self._context("recv")
        work = self._begin(context, messages.prepare_recv(context, out, source, tag))
        return messages.Receive(work)

    def _begin(self, context: Context, ready: Prepared) -> Work:
        """Start a message, which has no place in the order of the collectives."""
        self._here.starts = True
        work = self._transport.start(ready.call, ready.x, ready.out, ready.result)
        work.where = context.where
        return work

    def _finish_quick(self, work: object, x: Any) -> None:
        """Complete a call that the quick way left unfinished, or raise why it failed."""
        self._transport.finish_quick(work, x)

    def _interrupt_quick(self, kind: type[BaseException]) -> None:
        """Abort after a signal's handler has raised in the middle of a quick call."""
        self._transport.abort(f"a collective was interrupted by {kind.__name__}")
