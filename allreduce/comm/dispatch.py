"""Check and start the calls of one member, in one order for all threads of its process."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from numpy.typing import NDArray

from allreduce import _native
from allreduce.cluster import Store
from allreduce.comm.arguments import messages
from allreduce.comm.arguments.checks import Context, Options, check_empty, check_stays
from allreduce.comm.arguments.device_arrays import device_of, prepare_message
from allreduce.comm.arguments.device_arrays import prepare as prepare_on_device
from allreduce.comm.arguments.prepare import Prepared, prepare
from allreduce.comm.calls.call import Call, kind
from allreduce.comm.core.transport import (
    DeviceTransport,
    FastTransport,
    PreparedOnDevice,
    Transport,
)
from allreduce.comm.core.work import Work
from allreduce.comm.failures.reporter import group_text
from allreduce.devices import COLLECTIVE, Device
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    OutOfMemoryError,
    UnsupportedError,
    UsageError,
    everywhere,
)

T = TypeVar("T")

_IN_A_THREAD = (
    "call it in another thread, with a separate communicator (comm.split) if this one is used "
    "meanwhile"
)


class Dispatcher:
    """Starts the calls of one member on its transport.

    Args:
        label: This member's name in messages: "rank 2".
    """

    def __init__(
        self, transport: Transport, *, name: str, label: str, rank: int, size: int
    ) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.where = f"[{transport.name}] {group_text(name)}{label}"
        self.transport = transport
        # Native methods read this attribute and pass plain arrays to it.
        host = transport.on_host
        self.fast_path = host.native if isinstance(host, FastTransport) else None
        self.store: Store  # for texts that members exchange outside calls; set by open_members
        self.closed = False
        self._thread = threading.local()  # `starts`: whether this thread's call has been checked
        # Held to start a call, or to make a compound call without interleaving.
        self.lock = threading.RLock()

    def check_open(self) -> None:
        """Raise if the communicator was closed."""
        if self.closed:
            group = group_text(self.name)
            origin = "the communicator that it came from" if group else "allreduce.init()"
            raise ClosedError(f"{self.where}: the communicator is closed; {origin} makes a new one")

    def context(self, collective: str) -> Context:
        """Return the context of a call for messages; raise if the communicator is closed."""
        self.check_open()
        return Context(collective, self.where, self.name, self.rank, self.size)

    def call(self, begin: Callable[[], Work], async_op: bool) -> Any:
        """Start a call, and wait for it if not `async_op`.

        If a signal handler interrupts it, abort the communicator: the call must not write to the
        caller's arrays later.
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
            calls: Makes the calls and waits for each.
            async_op: Whether the caller asked for a `Work`.
            instead: The remedy for the error in that case.

        Raises:
            UnsupportedError: The caller asked for a `Work`.
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
        """Abort after a signal handler raised, unless the call is complete.

        Without a work the call may have started, unless the caller's array raised before.
        """
        of_array = isinstance(error, Exception) and not self._thread.starts
        if not (of_array if work is None else work.settled):
            self.transport.abort_interrupted("a call", error)

    def exclusively(self, calls: Callable[[], T]) -> T:
        """Run `calls` while no other thread can start a call, not even on the fast path.

        Not a context manager: a signal handler that interrupts its exit would keep the lock held.
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

    def finish_compound(self) -> None:
        """Wait until no other thread is in a compound call."""
        with contextlib.suppress(UsageError):  # this thread or process must not call
            self.exclusively(lambda: None)

    def start(
        self,
        collective: str,
        x: Any,
        options: Options,
        out: Any = None,
        whole: Any = None,
        context: Context | None = None,
    ) -> Work:
        """Check and start a call; see `prepare` for the arguments.

        Args:
            context: The call's; by default an open communicator's.
        """
        context = context or self.context(collective)
        device = device_of(context, x, out)
        if device is None:
            return self.start_prepared(context, prepare(context, x, options, out, whole))
        start = self.bind_on_device(context, device, x, options, out, whole)
        return self.in_order(context, start)

    def bind_on_device(
        self,
        context: Context,
        device: Device,
        x: Any,
        options: Options,
        out: Any,
        whole: Any = None,
        *,
        ordered: bool = False,
    ) -> Callable[[], Work]:
        """Check a call of arrays that lie on a device; returns a function that starts it."""
        transport = self.device_transport(context, device)
        ready = self.prepare_on_device(context, device, x, options, out, whole)
        return functools.partial(transport.start_on_device, ready, ordered=ordered)

    def prepare_on_device(
        self,
        context: Context,
        device: Device,
        x: Any,
        options: Options,
        out: Any,
        whole: Any = None,
    ) -> PreparedOnDevice:
        """Check a call of arrays that lie on a device."""
        transport = self.device_transport(context, device)
        ready = prepare_on_device(context, device, x, options, out, whole)
        transport.check_carries(context.where, ready.call)
        return ready

    def device_transport(self, context: Context, device: Device) -> DeviceTransport:
        """Return the transport for arrays on a device.

        Raises:
            UnsupportedError: It carries arrays of the host only.
        """
        if not isinstance(self.transport, DeviceTransport):
            raise UnsupportedError(
                f"{context.where} got an array on {device.name.local}, but transport "
                f"{self.transport.name!r} carries arrays in the host's memory; choose "
                "transport='nccl', or copy the array to the host"
            )
        return self.transport

    def bind(
        self, collective: str, x: Any, options: Options, out: Any, *, ordered: bool = False
    ) -> Callable[[], Work]:
        """Check a call of arrays that stay the same; returns a function that starts it.

        Args:
            collective, x, options, out: The call.
            ordered: Of arrays on a device: whether its collective stream waits for what writes them
                already, as in the steps of a program.
        """
        # Between the matrix products of a training step, which leave the caches cold, a start took
        # 50 us instead of 320.
        context = self.context(collective)
        device = device_of(context, x, out)
        if device is None:
            check_stays(context, x=x, out=out)
            ready = prepare(context, x, options, out)
            start = self.transport.bind(ready.call, ready.x, ready.out, ready.result)
        else:
            start = self.bind_on_device(context, device, x, options, out, ordered=ordered)
            if not ordered:
                start = functools.partial(_start_behind, device, (x, out), start)
        return self.prepared(context, start)

    def prepared(self, context: Context, start: Callable[[], Work]) -> Callable[[], Work]:
        """Return a function that starts a checked call in the order of all calls."""

        def begin() -> Work:
            self.check_open()
            work: Work = self.call(functools.partial(self.in_order, context, start), True)
            return work

        return begin

    def enqueue(self, collective: str, x: Any, options: Options, out: Any) -> Work:
        """Start a collective behind what its stream waits for; see `Communicator.enqueue`."""
        context = self.context(collective)
        if device_of(context, x, out) is None:
            raise UsageError(f"{context.where}: enqueue takes arrays on devices")
        return self.bind(collective, x, options, out, ordered=True)()

    def allocate(self, shape: Any, dtype: Any) -> NDArray[Any]:
        """Allocate an array in symmetric memory; see `Communicator.empty`."""
        lengths, element = check_empty(self.context("empty"), shape, dtype)
        nbytes = math.prod(lengths) * element.itemsize

        def allocate() -> NDArray[Any]:
            if self.size > 1:
                self.meet(f"empty({lengths}, dtype={str(element)!r})").wait()
            try:
                return self.transport.empty(nbytes)
            except OutOfMemoryError as error:
                everywhere(error)
                raise

        with self.transport.uninterrupted("a call"):
            part = self.exclusively(allocate)
        return part[:nbytes].view(element).reshape(lengths)

    def start_prepared(self, context: Context, ready: Prepared) -> Work:
        """Start a call that has been checked."""
        start = self.transport.start
        return self.in_order(context, start, ready.call, ready.x, ready.out, ready.result)

    def step(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Any:
        """Make one call of a compound call, and return its result.

        It also runs after another thread called `close()`, which waits for the compound call.
        """
        context = Context(collective, self.where, self.name, self.rank, self.size)
        return self.start(collective, x, options, out, whole, context).wait()

    def meet(self, call_text: str = "") -> Work:
        """Start a barrier whose text must be equal on all members."""
        context = self.context(call_text.partition("(")[0] or "barrier")
        call = Call("barrier", None, "none", 0, None, self.name, call_text=call_text)
        return self.in_order(context, self.transport.start, call, None, None, lambda: None)

    def in_order(self, context: Context, start: Callable[..., Work], *arguments: Any) -> Work:
        """Start a collective once no other thread is in a compound call."""
        self.transport.admit()  # in a child made by fork nobody may release the lock
        self._thread.starts = True
        with self.lock:
            work = start(*arguments)
        work.where = context.where
        return work

    def send(self, x: Any, dest: int, tag: int) -> Work:
        """Check and start a send."""
        context = self.context("send")
        if (device := device_of(context, x)) is not None:
            return self._message_on_device(context, device, x, dest, tag)
        return self._begin(context, messages.prepare_send(context, x, dest, tag))

    def receive(self, out: Any, source: int, tag: int) -> Work:
        """Check and start a recv."""
        context = self.context("recv")
        if (device := device_of(context, out)) is not None:
            return self._message_on_device(context, device, out, source, tag)
        work = self._begin(context, messages.prepare_recv(context, out, source, tag))
        return messages.Receive(work)

    def _message_on_device(
        self, context: Context, device: Device, array: Any, peer: Any, tag: Any
    ) -> Work:
        """Start a send or recv of an array on a device; these are ordered as collectives are."""
        transport = self.device_transport(context, device)
        ready = prepare_message(context, device, array, peer, tag)
        transport.check_carries(context.where, ready.call)
        return self.in_order(context, functools.partial(transport.start_on_device, ready))

    def _begin(self, context: Context, ready: Prepared) -> Work:
        """Start a message; messages need no order relative to collectives."""
        self._thread.starts = True
        work = self.transport.start(ready.call, ready.x, ready.out, ready.result)
        work.where = context.where
        return work

    def finish_fast(self, work: object, x: Any) -> None:
        """Complete a call that the fast path left unfinished; raise if it failed."""
        host = self.transport.on_host
        assert isinstance(host, FastTransport), "it had a fast path"
        host.finish_fast(work, x)

    def interrupt_fast(self, kind: type[BaseException]) -> None:
        """Abort after a signal handler raised during a call on the fast path."""
        reason = f"a collective was interrupted by {kind.__name__}"
        self.transport.abort(reason, interrupted=issubclass(kind, KeyboardInterrupt))


def _start_behind(device: Device, arrays: Sequence[Any], start: Callable[[], Work]) -> Work:
    """Start a call of arrays on a device, behind what their libraries do with them."""
    for array in arrays:
        device.view(array, device.own(COLLECTIVE))
    return start()


F = TypeVar("F", bound=Callable[..., Any])


def fast_path(
    operators: Sequence[str | None] = (None,), default: str | None = None
) -> Callable[[F], F]:
    """Decorate a collective's method so that native code runs calls of plain NumPy arrays.

    The method itself handles all other calls: other arrays, arrays that need a copy, wrong
    arguments, `counts`, factors, `async_op`, and transports that are no `FastTransport`.

    Args:
        operators: The operators of the collective; `(None,)` if it has none.
    """

    def decorate(method: F) -> F:
        kinds = {op: kind(method.__name__, op) for op in operators}
        native: Any = _native.FastMethod(method, kinds, default)
        return cast(F, functools.update_wrapper(native, method))

    return decorate
