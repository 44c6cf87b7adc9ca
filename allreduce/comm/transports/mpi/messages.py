"""Messages between two members over MPI: each is announced by a header, so that both must agree.

A receive looks for a header, and from then on names source and tag exactly: the sender's next
message with that tag is the array. It is received only if its type and size are as expected. A
header belongs to the receive that was started first among those that take it, as MPI has it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allreduce.comm.calls.call import ANY, Array, Call
from allreduce.comm.calls.call_site import NOTE_BYTES, Note
from allreduce.comm.failures.mismatch import Side, describe
from allreduce.comm.transports.mpi.types import Library
from allreduce.errors import MismatchError, UsageError

_HEADER = struct.Struct(f"<q16s{NOTE_BYTES}s")  # elements, type, note


@dataclass
class Message:
    """One send or receive of this member; `post` it once, then ask until it is `complete`."""

    library: Library
    comm: Any
    call: Call
    array: Array
    where: str
    note: bytes = b""  # for the error of one that expects something else
    found: tuple[int, int] | None = None  # a receive's source and tag, once a header has named them
    _header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    _requests: list[Any] = field(default_factory=list)
    _expected: list[Any] = field(default_factory=list)  # the header that is being received

    def __post_init__(self) -> None:
        most = self.comm.Get_attr(self.library.mpi.TAG_UB)
        if (self.call.tag or 0) > most:
            raise UsageError(
                f"{self.where}: {self.call.collective}: this MPI's tags end at {most}, but tag is "
                f"{self.call.tag}; choose a smaller one"
            )

    @property
    def incoming(self) -> bool:
        return self.call.collective == "recv"

    def send(self) -> None:
        """Send the header and the array."""
        self._header[:] = _HEADER.pack(self.call.count, self.call.dtype.encode(), self.note)
        place = (self.call.root, self.call.tag or 0)
        self._requests.append(self.comm.Isend(self._header, *place))
        self._requests += [self.comm.Isend(part, *place) for part in self._parts()]

    def takes(self, source: int, tag: int) -> bool:
        """Return whether a message of this origin may still be this receive's."""
        if self.found is not None:
            return self.found == (source, tag)
        return self.call.root in (ANY, source) and self.call.tag in (ANY, tag)

    def look(self, earlier: list[Message]) -> bool:
        """Look for the header; returns whether the array is on its way, so that others may look.

        Args:
            earlier: Receives that were started before and still look.

        Raises:
            MismatchError: The sender sends something else.
        """
        if self.found is None:
            self._match(earlier)
        if self.found is None or not self._expected[0].Test():
            return False
        count, dtype, note = _HEADER.unpack(self._header)
        name = dtype.rstrip(b"\0").decode()
        source, tag = self.found
        if (count, name) != (self.call.count, self.call.dtype):
            rank = self.comm.Get_rank()
            sent = Call("send", None, name, count, rank, self.call.group, tag=tag)
            sender_note = Note.unpack(note.rstrip(b"\0"))
            first = Side(f"rank {source}", sent, sender_note)
            second = Side(f"rank {rank}", self.call, Note.unpack(self.note))
            raise MismatchError(describe("a message", first, second))
        self._requests += [self.comm.Irecv(part, source, tag) for part in self._parts()]
        return True

    def _match(self, earlier: list[Message]) -> None:
        mpi, status = self.library.mpi, self.library.mpi.Status()
        source = mpi.ANY_SOURCE if self.call.root == ANY else self.call.root
        tag = mpi.ANY_TAG if self.call.tag == ANY else self.call.tag or 0
        if not self.comm.Iprobe(source, tag, status):
            return
        origin = (status.Get_source(), status.Get_tag())
        if any(other.takes(*origin) for other in earlier):
            return  # theirs, in their next look
        message = self.comm.Improbe(*origin)
        if message is not None:
            self.found = origin
            self._expected.append(message.Irecv(self._header))

    def complete(self) -> bool:
        """Return whether the array has gone, or has come."""
        if self.incoming and not self._requests:
            return False
        return bool(self.library.mpi.Request.Testall(self._requests))

    def _parts(self) -> Iterator[list[Any]]:
        raw = self.array.reshape(-1).view(np.uint8)
        most = self.library.most
        for first in range(0, max(raw.size, 1), most):  # an empty array is a message too
            part = raw[first : first + most]
            yield [part, part.size, self.library.mpi.BYTE]
