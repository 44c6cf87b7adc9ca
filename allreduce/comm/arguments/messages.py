"""Check the arguments of send and recv, and prepare them for transports."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce.comm.arguments import checks
from allreduce.comm.arguments.arrays import borrow, borrow_out
from allreduce.comm.arguments.checks import Context
from allreduce.comm.arguments.overlap import check_own
from allreduce.comm.arguments.prepare import Prepared, contiguous, new_output
from allreduce.comm.calls.call import ANY, COUNT_LIMIT, Array, Call
from allreduce.comm.core.work import Work
from allreduce.errors import UnsupportedError, UsageError

_TAG_LIMIT = 1 << 31


class Receive(Work):
    """A started recv. After its wait it has the message's source and tag."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.where = work.where

    @property
    def settled(self) -> bool:
        return self._work.settled

    def done(self) -> bool:
        return self._work.done()

    def finish(self, timeout: float | None) -> Any:
        return self._work.wait(timeout)

    def __repr__(self) -> str:
        message = f", of tag {self.tag} from member {self.source}" if self._finished else ""
        return f"{super().__repr__()[:-1]}{message}>"

    @property
    def source(self) -> int:
        """The member that sent the message."""
        return self.origin()[0]

    @property
    def tag(self) -> int:
        """The tag under which it was sent."""
        return self.origin()[1]

    def origin(self) -> tuple[int, int]:
        if not self._finished:
            raise UsageError(
                f"{self.where}: source and tag are known after wait(); call that first"
            )
        return self._work.origin()


def prepare_send(context: Context, x: Any, dest: Any, tag: Any) -> Prepared:
    """Check the arguments of a send.

    Raises:
        UsageError: An argument is wrong.
        UnsupportedError: The array's type is not carried.
    """
    to = check_peer(context, "dest", dest)
    number = _tag(context, tag)
    source = contiguous(context, borrow(context.where, x).array)
    return Prepared(_call(context, source, to, number), source, None, lambda: None)


def prepare_recv(context: Context, out: Any, source: Any, tag: Any) -> Prepared:
    """Check the arguments of a recv.

    Raises:
        UsageError: An argument is wrong.
        UnsupportedError: The array's type is not carried.
    """
    peer = ANY if _is_any(source) else check_peer(context, "source", source)
    number = ANY if _is_any(tag) else _tag(context, tag)
    if out is None or isinstance(out, np.generic | int | float | complex):
        raise UsageError(
            f"{context.where} takes an array to receive into, but got "
            f"{'None' if out is None else type(out).__name__}; make one of the message's dtype "
            "and size, as by numpy.empty"
        )
    target = borrow_out(f"{context.where}: out", out)
    if not target.flags.writeable:
        raise UsageError(f"{context.where}: out is read-only; pass a writable array")
    check_own(f"{context.where}: out", target)
    buffer = (
        target if target.flags.c_contiguous else new_output(context, target.shape, target.dtype)
    )

    def result() -> Any:
        if buffer is not target:
            target[...] = buffer
        return out

    return Prepared(_call(context, target, peer, number), None, buffer, result)


def _call(context: Context, array: Array, peer: int, tag: int) -> Call:
    checks.check_op(context, None, array.dtype)
    if array.size >= COUNT_LIMIT:
        raise UnsupportedError(
            f"{context.where} carries fewer than {COUNT_LIMIT} elements, but got {array.size}; "
            "pass the array in pieces"
        )
    group = context.group
    return Call(context.collective, None, str(array.dtype), array.size, peer, group, tag=tag)


def _is_any(number: Any) -> bool:
    return checks.is_whole(number) and number == ANY


def check_peer(context: Context, name: str, peer: Any) -> int:
    if not checks.is_whole(peer) or not 0 <= peer < context.size:
        choice = " or ANY" if name == "source" else ""
        raise UsageError(
            f"{context.where} got {name}={peer!r}; expected a rank from 0 to {context.size - 1}"
            f"{choice}"
        )
    return int(peer)


def _tag(context: Context, tag: Any) -> int:
    if not checks.is_whole(tag) or not 0 <= tag < _TAG_LIMIT:
        choice = ", or ANY" if context.collective == "recv" else ""
        raise UsageError(
            f"{context.where} got tag={tag!r}; expected a whole number from 0 to "
            f"{_TAG_LIMIT - 1}{choice}"
        )
    return int(tag)
