"""A communicator: collectives, messages and plain data among a fixed set of members."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import DTypeLike, NDArray

from allreduce.comm import compound, objects
from allreduce.comm.arguments.checks import Options, factors
from allreduce.comm.calls.call import ANY, OPERATORS
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core import lifecycle
from allreduce.comm.core.transport import DeviceTransport, Transport
from allreduce.comm.core.work import Work
from allreduce.comm.dispatch import Dispatcher, fast_path
from allreduce.comm.group_factory import GroupFactory
from allreduce.devices import Device
from allreduce.keywords import explain

_FIXED = frozenset({"rank", "size", "local_rank", "local_size", "transport"})
_REDUCING = OPERATORS[1:]  # all but "none"


class Communicator:
    """Runs collective calls among its members; all members make the same calls in the same order.

    Collectives take NumPy arrays, CPU arrays of libraries that support DLPack (PyTorch, JAX) and
    Python numbers, and return the same kind. With `async_op=True` they return a `Work` at once; do
    not touch the arrays until its `wait()` returns. Threads may share a communicator if they start
    their calls in the same order on all members. Results are the same on all members. The shared
    transport adds in member order, so its sums are also bitwise the same from run to run.

    After an error a communicator is dead on all members: each call raises `ClosedError`, which
    repeats the cause.

    Common arguments:
        x: The contribution, as `Communicator` describes; equal in shape and dtype on all members
            unless stated otherwise. Some collectives take a list of arrays as one call.
        op: "sum", "mean", "min", "max", "prod", "logical_and", "logical_or", "bitwise_and",
            "bitwise_or" or "bitwise_xor".
        prescale, postscale: Factors before and after a sum or mean of floating-point or complex
            arrays; the same on all members.
        root: The member that sends or receives; on other members a rooted result is None.
        counts: Rows of every member's share, the same list on all members; default: equal shares.
        out: The output array; default: a new array. It may be `x` itself. If the collective joins
            or splits rows, the shorter array may be this member's rows of the longer one. It must
            not overlap `x` in any other way. Ignored if there is no result.
        async_op: Return a `Work` without waiting. Not possible for calls that consist of several:
            a `scatter` without `out`, an `all_to_all` with `counts`, and plain data.
        value: Plain Python data: numbers, strings, bytes, None, and lists and dicts of them.
            Nothing is pickled; tuples arrive as lists, and NumPy's numbers as Python's.

    Raises:
        UsageError, UnsupportedError: An argument is wrong; ShapeError for a wrong shape.
        MismatchError: Members made different calls; no output is touched.
        PeerLostError: A member died, left or gave up.
        TimeoutError: Members did not come in time.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str,
        label: str,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.transport = transport.name
        self._dispatch = Dispatcher(transport, name=name, label=label, rank=rank, size=size)
        self._groups: GroupFactory[Communicator]  # set by open_members
        self._closer = threading.Lock()  # acquired, and never released, by the first `close`

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(f"{self._dispatch.where}: {name} cannot be set")
        super().__setattr__(name, value)

    @property
    def name(self) -> str:
        """The name in messages; unique, and the same on all members."""
        return self._dispatch.name

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._dispatch.closed

    @property
    def dead(self) -> bool:
        """Whether an error has ended the communicator."""
        return self._dispatch.transport.dead

    def enqueues_on(self, device: Device) -> bool:
        """Return whether calls of a device's arrays are enqueued on its collective stream."""
        transport = self._dispatch.transport
        return isinstance(transport, DeviceTransport) and transport.enqueues_on(device)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ", dead" if self.dead else ""
        return f"<Communicator {self.name!r}: {self.rank} of {self.size}, {self.transport}{state}>"

    @fast_path(_REDUCING, "sum")
    @explain()
    def all_reduce(
        self,
        x: Any,
        *,
        op: str = "sum",
        prescale: complex = 1.0,
        postscale: complex = 1.0,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the members' arrays element by element; every member gets the result.

        `x` may be a list of arrays; then `out` and the result are lists, too.
        """
        options = Options(op, scale=factors(prescale, postscale))
        return self._finish("all_reduce", x, options, out, async_op)

    @fast_path(_REDUCING, "sum")
    @explain()
    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str = "sum",
        prescale: complex = 1.0,
        postscale: complex = 1.0,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the members' arrays, or lists of arrays, on the root."""
        options = Options(op, root, scale=factors(prescale, postscale))
        return self._finish("reduce", x, options, out, async_op)

    @fast_path(_REDUCING, "sum")
    @explain()
    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        prescale: complex = 1.0,
        postscale: complex = 1.0,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the members' arrays `(rows, ...)`; every member gets its share of the rows."""
        options = Options(op, counts=counts, scale=factors(prescale, postscale))
        return self._finish("reduce_scatter", x, options, out, async_op)

    @fast_path()
    @explain()
    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Join the members' arrays along axis 0, in member order; every member gets all.

        `x` is `(rows, ...)`, with `counts[rank]` rows if `counts` is given; a number is one row.
        """
        return self._finish("all_gather", x, Options(counts=counts), out, async_op)

    @explain()
    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Join the members' arrays along axis 0, in member order; the root gets the result."""
        return self._finish("gather", x, Options(root=root, counts=counts), out, async_op)

    @explain()
    def scatter(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Split the root's array `(rows, ...)` along axis 0; every member gets its share.

        The others pass None for `x`. Pass `out` on all members or on none: without it, the root
        first sends them the dtype and shape of its array, so the call cannot be asynchronous.

        Raises:
            UsageError: A member that is not the root passes an array.
            UnsupportedError: `async_op` without `out`.
        """
        return compound.scatter(self._dispatch, x, root, counts, out, async_op)

    @fast_path()
    @explain()
    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send the root's array, or list of arrays, to every member.

        The others pass arrays of the same shape and dtype; `out` may be `x`.
        """
        return self._finish("broadcast", x, Options(root=root), out, async_op)

    @fast_path()
    @explain()
    def all_to_all(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send every member its share of the rows of `x`, and join the rows received.

        `counts[i]` rows go to member i. The counts may differ between members, which exchange them
        first, so the call cannot be asynchronous.
        """
        if counts is None or isinstance(x, list | tuple):
            return self._finish("all_to_all", x, Options(counts=counts), out, async_op)
        return compound.all_to_all(self._dispatch, x, counts, out, async_op)

    @fast_path()
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until all members have called."""
        finished: Work | None = self._dispatch.call(self._dispatch.meet, async_op)
        return finished

    @explain()
    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send an array or number to one member, which calls `recv`.

        Sends and recvs need no order relative to the collectives. Messages from one member are
        received in the order of their sends. A small message may still be in flight when this
        returns; a large one has been received.

        Args:
            dest: The receiving member. A member that sends to itself starts the send or the recv
                with `async_op`.
            tag: A number from 0 that a recv can select messages by.

        Raises:
            MismatchError: The recv has another dtype or number of elements.
        """
        return self._dispatch.call(functools.partial(self._dispatch.send, x, dest, tag), async_op)

    @explain()
    def recv(self, out: Any, source: int = ANY, tag: int = ANY, *, async_op: bool = False) -> Any:
        """Receive the first message that matches source and tag into `out`, and return `out`.

        Args:
            out: A writable array of the message's dtype and number of elements; the shape is free.
            source: The sending member, or `ANY`.
            tag: The message's tag, or `ANY`.
            async_op: Return a `Receive`; after its wait, its `source` and `tag` are those of the
                message.

        Raises:
            MismatchError: The message has another dtype or number of elements.
        """
        begin = functools.partial(self._dispatch.receive, out, source, tag)
        return self._dispatch.call(begin, async_op)

    @explain()
    def broadcast_object(self, value: Any = None, *, root: int = 0, async_op: bool = False) -> Any:
        """Send the root's plain data to every member; other members' values are ignored."""
        return compound.of_objects(self._dispatch, objects.broadcast_object, async_op, value, root)

    @explain()
    def gather_object(self, value: Any, *, root: int = 0, async_op: bool = False) -> Any:
        """Return a list of every member's plain data, by rank, on the root; None elsewhere."""
        return compound.of_objects(self._dispatch, objects.gather_object, async_op, value, root)

    @explain()
    def all_gather_object(self, value: Any, *, async_op: bool = False) -> Any:
        """Return a list of every member's plain data, by rank."""
        return compound.of_objects(self._dispatch, objects.all_gather_object, async_op, value)

    @explain()
    def split(
        self, color: int | None, key: int = 0, *, transport: str | None = None
    ) -> Communicator | None:
        """Make one communicator per color; a collective call.

        The caller closes the new communicator; parent and parts may be closed in any order.

        Args:
            color: Members with the same color form a communicator; None for none.
            key: Members of a part are numbered by key, then by rank here.
            transport: The parts' transport; default: this one's. The same on all members.

        Returns:
            This member's part, or None without a color.

        Raises:
            MismatchError: Members name different transports.
            UnsupportedError: A process may have several members here.
        """
        return self._groups.split(color, key, transport)

    @explain()
    def group(self, ranks: Sequence[int], *, transport: str | None = None) -> Communicator | None:
        """Make a communicator of some members; a collective call among them.

        Other members may call, too, and get None at once. So every rank can make the same list of
        groups and gets its own.

        Args:
            ranks: The members' ranks here, in the order of their new ranks; the same on all of
                them.
            transport: The group's transport; default: this one's. The same on all of them.

        Raises:
            UsageError: A rank does not exist, or is listed twice.
            MismatchError: Members name different transports.
            TimeoutError: A member did not call, or waits in another group; the message names it.
            PeerLostError: A member has died.
            UnsupportedError: A process may have several members here.
        """
        return self._groups.group(ranks, transport)

    @property
    def local(self) -> Communicator:
        """The communicator of this host's members; closed with this communicator.

        Made on first access, which is a collective call of its members.
        """
        return self._groups.local()

    @property
    def across(self) -> Communicator:
        """The communicator of one member per host, those with the same local position as this one.

        Made on first access, which is a collective call of its members, and closed with this
        communicator. A host with fewer members has none in the last of these communicators.
        """
        return self._groups.across()

    @explain()
    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """Allocate an array of zeros in symmetric memory; a collective call.

        Collectives whose arrays (or slices) lie in symmetric memory on every member copy nothing.
        The memory is freed with the last array that uses it. After the communicator has died it
        stays readable and writable, and no other member changes it; outputs of failed calls are
        undefined.

        Raises:
            OutOfMemoryError: A member lacks the memory; raised on all members.
            MismatchError: Members asked for different shapes or dtypes.
        """
        return self._dispatch.allocate(shape, dtype)

    @explain()
    def plan(
        self,
        collective: str,
        x: Any = None,
        *,
        op: str | None = None,
        prescale: complex | None = None,
        postscale: complex | None = None,
        root: int | None = None,
        counts: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
        out: Any = None,
        dest: int | None = None,
        source: int | None = None,
        tag: int | None = None,
    ) -> Plan:
        """Return the plan of a call, to print, without making the call; not a collective call.

        Args:
            collective: "all_reduce", "broadcast", "barrier", "send", ...
            x: The call's array: the plan depends on its size, type and memory. For scatter, the
                root's array on every rank; for recv, the output.
            op: The operator; default: "sum" for reductions.
            prescale, postscale, root, counts, dest, source, tag: As for the call.
            receives: For all_to_all with counts: the rows that this rank would get from each.
            out: As for the call; default: a new array.

        Raises:
            UsageError, UnsupportedError: As the call itself would.
        """
        from allreduce.comm import planning  # few programs use it

        given: dict[str, Any] = {"op": op, "prescale": prescale, "postscale": postscale}
        given |= {"root": root, "counts": counts, "receives": receives, "out": out}
        return planning.describe(
            self, collective, x, given | {"dest": dest, "source": source, "tag": tag}
        )

    def enqueue(
        self,
        collective: str,
        x: Any,
        *,
        out: Any,
        op: str | None = None,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Start a collective of arrays on a device behind what its collective stream waits for.

        The collective itself, with `async_op`, waits for all work that the device was given before.

        Args:
            collective: "all_reduce" or "all_gather".
            x, out, op, counts: As for the call.
        """
        return self._dispatch.enqueue(collective, x, Options(op, counts=counts), out)

    @explain()
    def all_reduce_init(self, x: Any, *, op: str = "sum", out: Any) -> Callable[[], Work]:
        """Prepare an all_reduce of the same arrays in every step; not a collective call.

        Each call of the returned function is an `all_reduce(x, op=op, out=out, async_op=True)`
        without its checks. Wait for its work before the next call.

        Source: MPI 4.0, section 6.13, persistent collective operations.

        Args:
            x, op, out: As for `all_reduce`.

        Raises:
            UsageError: An array of the host is not NumPy's, or an array is not contiguous.
        """
        return self._dispatch.bind("all_reduce", x, Options(op), out)

    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        """Make the communicator dead on all members; the others raise rank and reason.

        Args:
            reason: The cause, for the others' messages; about 250 bytes are kept.
            interrupted: Whether an interrupt such as Ctrl-C is the cause; the others get it as
                `PeerLostError.interrupted`.
        """
        self._dispatch.transport.abort(reason, interrupted=interrupted)

    def close(self) -> None:
        """Complete all started calls and leave; also closes `local` and `across`.

        Not a collective call: the others may continue until they need this member. A recv that
        another thread waits for, without a message yet, raises `ClosedError`.
        """
        self._close(drain=True)

    def _close(self, drain: bool) -> None:
        first = self._closer.acquire(blocking=False)
        dispatch = self._dispatch
        dispatch.closed, dispatch.fast_path = True, None
        with contextlib.ExitStack() as stack:  # run all of them, even if one fails
            stack.callback(lifecycle.remove, dispatch.transport)
            self._groups.close(stack, drain, first)
            stack.callback(dispatch.transport.close, drain)
            if drain and not dispatch.transport.dead:
                stack.callback(dispatch.finish_compound)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            lifecycle.end_block(self._dispatch.transport, error)
        self._close(drain=error is None)

    def _finish(self, collective: str, x: Any, options: Options, out: Any, async_op: bool) -> Any:
        """Make a collective of an array, or of a list of arrays."""
        begin: Callable[..., Work] = self._dispatch.start
        if isinstance(x, list | tuple):
            from allreduce.comm import lists  # few programs use it

            begin = functools.partial(lists.start, self._dispatch)
        return self._dispatch.call(functools.partial(begin, collective, x, options, out), async_op)
