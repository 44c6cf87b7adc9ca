"""The collectives, as callers see them."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from allreduce.comm.arguments import Context, prepare
from allreduce.comm.base import Transport, Work
from allreduce.comm.call import DTYPES, OPERATORS, Call, kind
from allreduce.errors import ClosedError, UsageError

_ALL_REDUCE = {op: kind("all_reduce", op) for op in OPERATORS[1:]}


class Communicator:
    """Orders collective calls over its members; every member makes the same calls in one order.

    Collectives take NumPy arrays of float64, float32, int32 or int64, or Python numbers, and give
    back the same kind. With `async_op=True` they return a `Work` at once; the arrays belong to it
    until its `wait()` returns. Sums are added in the order of members, so results are bitwise the
    same on all members and from run to run.

    After an error a communicator is dead on all members: each call raises `ClosedError`, which
    repeats the cause.
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
        self._name = name
        self._where = f"[{transport.name}] {label}"
        self._transport = transport
        self._quick = transport.quick()
        self._quick_seconds = transport.quick_seconds
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Communicator {self._name!r}: {self.rank} of {self.size}, {self.transport}{state}>"

    def all_reduce(
        self, x: Any, *, op: str = "sum", out: NDArray[Any] | None = None, async_op: bool = False
    ) -> Any:
        """Combine the members' arrays element by element; every member gets the result.

        Args:
            x: The contribution, of one shape and dtype on all members.
            op: "sum", "mean" (of floats), "min", "max" or "prod".
            out: Where the result goes: an array like `x`, or `x` itself; a new array without it.
            async_op: Return a `Work` without waiting.
        """
        if type(x) is np.ndarray and not async_op and self._quick is not None:
            packed = _ALL_REDUCE.get(op) if type(op) is str else None
            target = np.empty_like(x) if out is None else out
            if packed is not None and type(target) is np.ndarray:
                outcome = self._run_quick(packed, x, target)
                if outcome:
                    return target
        return self._run("all_reduce", x, op, None, out, async_op)

    def reduce_scatter(
        self, x: Any, *, op: str = "sum", out: NDArray[Any] | None = None, async_op: bool = False
    ) -> Any:
        """Combine the members' arrays; every member gets its share of the result.

        Args:
            x: The contribution, `(rows, ...)`; the number of members divides its rows.
            op: As in `all_reduce`.
            out: `(rows // size, ...)`, apart from `x`; a new array without it.
            async_op: Return a `Work` without waiting.
        """
        return self._run("reduce_scatter", x, op, None, out, async_op)

    def all_gather(self, x: Any, *, out: NDArray[Any] | None = None, async_op: bool = False) -> Any:
        """Join the members' arrays along axis 0, in member order; every member gets all.

        Args:
            x: The contribution, `(rows, ...)`, of one shape on all members; a number counts as one
                row.
            out: `(size * rows, ...)`; `x` may be this member's rows of it. New without it.
            async_op: Return a `Work` without waiting.
        """
        return self._run("all_gather", x, None, None, out, async_op)

    def broadcast(
        self, x: Any, *, root: int = 0, out: NDArray[Any] | None = None, async_op: bool = False
    ) -> Any:
        """Give every member the root's array.

        Args:
            x: The root's array; on the others, any array of that shape and dtype.
            root: The member whose array counts.
            out: Where it goes; `x` itself is fine. A new array without it.
            async_op: Return a `Work` without waiting.
        """
        return self._run("broadcast", x, None, root, out, async_op)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until all members have called."""
        self._check_open()
        work = self._transport.start(
            Call("barrier", None, "none", 0, None, self._name), None, None, lambda: None
        )
        if async_op:
            return work
        work.wait()
        return None

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """Allocate an array in symmetric memory; a collective call.

        Collectives whose arrays (or slices) lie in such memory on every member copy nothing. Its
        content is undefined. It is freed with the last array that uses it; after the communicator
        has died it still can be read, but peers may have left anything in it.

        Raises:
            OutOfMemoryError: A member cannot have the memory; raised on all members.
            MismatchError: Members asked for different sizes.
        """
        self._check_open()
        wanted = np.dtype(dtype)
        if str(wanted) not in DTYPES[1:]:
            raise UsageError(
                f"{self._where}: empty: dtype {wanted} is none that "
                f"collectives carry: {', '.join(DTYPES[1:])}"
            )
        dimensions = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        if any(length < 0 for length in dimensions):
            raise UsageError(f"{self._where}: empty: shape {dimensions} has a negative length")
        count = math.prod(int(length) for length in dimensions)
        part = self._transport.empty(count * wanted.itemsize)
        return part[: count * wanted.itemsize].view(wanted).reshape(dimensions)

    def abort(self, reason: str) -> None:
        """Make the communicator dead on all members; theirs raise an error with our rank and this.

        Args:
            reason: What happened, for the others' messages; about 250 bytes of it are kept.
        """
        self._transport.abort(reason)

    def close(self) -> None:
        """Complete what was started, and leave. Not collective: the others may go on without us,
        until they need us."""
        self._close(drain=True)

    def _close(self, drain: bool) -> None:
        self._closed = True
        self._quick = None
        self._transport.close(drain)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._close(drain=error is None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"{self._where}: the communicator is closed; allreduce.init() makes a new one"
            )

    def _run_quick(self, packed: int, x: NDArray[Any], out: NDArray[Any]) -> bool:
        """Try the quick way; False if the arrays need the careful way."""
        assert self._quick is not None
        try:
            outcome = self._quick(packed, x, out, self._quick_seconds)
        except BaseException as error:  # a signal's handler raised in the middle of the collective
            self._transport.abort(f"all_reduce was interrupted by {type(error).__name__}")
            raise
        if outcome is None:
            return False
        if outcome is not True:
            self._transport.finish_quick(outcome)
        return True

    def _run(
        self, collective: str, x: Any, op: str | None, root: int | None, out: Any, async_op: bool
    ) -> Any:
        self._check_open()
        context = Context(collective, self._where, self._name, self.rank, self.size)
        ready = prepare(context, x, op, root, out)
        work = self._transport.start(ready.call, ready.x, ready.out, ready.result)
        return work if async_op else work.wait()
