"""Check and start the calls of one member, in one order for all threads of its process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from allreduce import _native
from allreduce.cluster import Store
from allreduce.comm.arguments import messages
from allreduce.comm.arguments.checks import Context, Options
from allreduce.comm.arguments.prepare import Prepared, prepare
from allreduce.comm.calls.call import Call, kind
from allreduce.comm.core.transport import FastTransport, Transport, Work
from allreduce.comm.failures.reporter import group_text
from allreduce.errors import AllreduceError, ClosedError, UnsupportedError, is_interrupt

T = TypeVar("T")

_IN_A_THREAD = (
    "call it in another thread, with a communicator of its own (comm.split) if this one is used "
    "meanwhile"
)


class Dispatcher:
    """Starts the calls of one member on its transport.

    Args:
        transport: Carries the calls.
        name: The communicator's.
        label: This member's, for messages: "rank 2".
        rank: This member.
        size: How many members there are.
    """

    def __init__(
        self, transport: Transport, *, name: str, label: str, rank: int, size: int
    ) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.where = f"[{transport.name}] {group_text(name)}{label}"
        self.transport = transport
        # Native methods read it and hand plain arrays to it.
        self.fast_path = transport.native if isinstance(transport, FastTransport) else None
        self.store: Store | None = None  # where the members may leave texts for each other
        self.closed = False
        self._thread = (
            threading.local()
        )  # `starts`: whether this thread's call is behind its checks
        # Held to start a call, or to make several without another thread's call between them.
        self.lock = threading.RLock()

    def admit(self) -> None:
        """Refuse processes and threads that must not use this."""
        self.transport.admit()

    def check_open(self) -> None:
        """Raise if the communicator was closed."""
        if self.closed:
            group = group_text(self.name)
            who = "the communicator that it came from" if group else "allreduce.init()"
            raise ClosedError(f"{self.where}: the communicator is closed; {who} makes a new one")

    def context(self, collective: str) -> Context:
        """Return who is calling what; refuses a closed communicator."""
        self.check_open()
        return Context(collective, self.where, self.name, self.rank, self.size)

    def called(self, member: int) -> str:
        """Name a member as people know it: "rank 7 (member 2)"."""
        return self.transport.called(member)

    def call(self, begin: Callable[[], Work], async_op: bool) -> Any:
        """Start a call, and wait for it if not `async_op`.

        If a signal's handler interrupts it, the communicator is aborted: the call must not write to
        the caller's arrays later.
        """
        work: Work | None = None
        self._thread.starts = False
        try:
            work = begin()
            return work if async_op else work.wait()
        except AllreduceError:
            raise
        except BaseException as error:
            self._interrupted(error, work)
            raise

    def compound(
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
        self._thread.starts = False
        try:
            return self.exclusively(calls)
        except AllreduceError:
            raise
        except BaseException as error:
            self._interrupted(error, None)
            raise

    def _interrupted(self, error: BaseException, work: Work | None) -> None:
        """Abort after a signal's handler has raised, unless the call is complete.

        Without a work the call may have started, unless the caller's array raised before that.
        """
        of_array = isinstance(error, Exception) and not self._thread.starts
        if not (of_array if work is None else work.settled):
            reason = f"a call was interrupted by {type(error).__name__}"
            self.transport.abort(reason, interrupted=is_interrupt(error))

    def exclusively(self, calls: Callable[[], T]) -> T:
        """Let no other thread start a call meanwhile, not by the fast path either.

        This is no context manager: one whose exit a signal's handler interrupts keeps the lock.
        """
        self.transport.admit()  # in a child made by fork nobody may release the lock
        with self.lock:
            before, self.fast_path = self.fast_path, None
            try:
                return calls()
            finally:
                self.fast_path = before
                if self.closed:  # meanwhile
                    self.fast_path = None

    def start(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Work:
        """Check and start a call; the arguments are those of `prepare`."""
        context = self.context(collective)
        return self.start_prepared(context, prepare(context, x, options, out, whole))

    def start_prepared(self, context: Context, ready: Prepared) -> Work:
        """Start a call that has been checked."""
        start = self.transport.start
        return self.in_order(context, start, ready.call, ready.x, ready.out, ready.result)

    def step(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Any:
        """Make one of the calls of a compound one, and return its result.

        It is made also if another thread has called `close()`, which waits for the compound call.
        """
        context = Context(collective, self.where, self.name, self.rank, self.size)
        return self.start_prepared(context, prepare(context, x, options, out, whole)).wait()

    def meet(self, call_text: str = "") -> Work:
        """Start a barrier whose text must be equal on all members."""
        context = self.context(call_text.partition("(")[0] or "barrier")
        call = Call("barrier", None, "none", 0, None, self.name, call_text=call_text)
        return self.in_order(context, self.transport.start, call, None, None, lambda: None)

    def in_order(self, context: Context, start: Callable[..., Work], *arguments: Any) -> Work:
        """Start a collective, when no other thread makes calls that belong together."""
        self.transport.admit()  # in a child made by fork nobody may release the lock
        self._thread.starts = True
        with self.lock:
            work = start(*arguments)
        work.where = context.where
        return work

    def send(self, x: Any, dest: int, tag: int) -> Work:
        """Check and start a send."""
        context = self.context("send")
        return self._begin(context, messages.prepare_send(context, x, dest, tag))

    def receive(self, out: Any, source: int, tag: int) -> Work:
        """Check and start a recv."""
        context = self.context("recv")
        work = self._begin(context, messages.prepare_recv(context, out, source, tag))
        return messages.Receive(work)

    def _begin(self, context: Context, ready: Prepared) -> Work:
        """Start a message, which has no place in the order of the collectives."""
        self._thread.starts = True
        work = self.transport.start(ready.call, ready.x, ready.out, ready.result)
        work.where = context.where
        return work

    def finish_fast(self, work: object, x: Any) -> None:
        """Complete a call that the fast path left unfinished, or raise why it failed."""
        assert isinstance(self.transport, FastTransport), "it had a fast path"
        self.transport.finish_fast(work, x)

    def interrupt_fast(self, kind: type[BaseException]) -> None:
        """Abort after a signal's handler has raised in the middle of a call on the fast path."""
        reason = f"a collective was interrupted by {kind.__name__}"
        self.transport.abort(reason, interrupted=issubclass(kind, KeyboardInterrupt))


F = TypeVar("F", bound=Callable[..., Any])


def fast_path(
    operators: Sequence[str | None] = (None,), default: str | None = None
) -> Callable[[F], F]:
    """Decorate a collective's method so that native code carries out calls of plain arrays.

    The method itself gets everything else: other arrays, arrays that need a copy, wrong arguments,
    `counts`, factors and `async_op`, and all calls on transports without a `FastTransport`.

    Args:
        operators: The operators that the collective takes; None if it takes none.
        default: The operator of a call that names none.
    """

    def decorate(method: F) -> F:
        kinds = {op: kind(method.__name__, op) for op in operators}
        native: Any = _native.QuickMethod(method, kinds, default)
        return cast(F, functools.update_wrapper(native, method))

    return decorate
