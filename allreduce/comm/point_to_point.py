"""Messages between two members, as callers see them."""

from __future__ import annotations

import functools
from typing import Any

from allreduce.comm.call import ANY
from allreduce.comm.caller import Caller


class PointToPoint(Caller):
    """send and recv: only the two members take part."""

    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Give one member an array or number, which it takes by a `recv` of its own.

        Only these two take part: sends and recvs have no place in the order of the collectives. A
        recv takes the messages of one member in the order in which they were sent. A small message
        may be on its way when this returns, a large one has been taken by a recv.

        Args:
            dest: The member that gets it; it may be this one, whose recv then has to be started,
                or this send, with `async_op`.
            tag: A number from 0 that tells messages apart.

        Raises:
            MismatchError: The recv that takes it has another dtype or number of elements.
        """
        return self._call(functools.partial(self._send, x, dest, tag), async_op)

    def recv(self, out: Any, source: int = ANY, tag: int = ANY, *, async_op: bool = False) -> Any:
        """Receive into `out`, which is returned, the first message that fits source and tag.

        Args:
            out: A writable array of the message's dtype and number of elements; the shape is free.
            source: The member that it comes from, or `ANY`.
            tag: The message's tag, or `ANY`.
            async_op: Return a `Receive`, whose `source` and `tag` tell after its wait which
                message it was.

        Raises:
            MismatchError: The message has another dtype or number of elements.
        """
        return self._call(functools.partial(self._receive, out, source, tag), async_op)
