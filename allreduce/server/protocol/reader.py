"""Reads frames and their arrays from the socket of a data connection."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

import numpy as np

from allreduce.server.protocol import frames, segments
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.frames import HEAD, Announced, Frame
from allreduce.server.protocol.mpi_messages import MpiMessages

_BUFFER_BYTES = 1 << 16
_INT = struct.Struct("i")  # a descriptor
_RIGHTS_BYTES = socket.CMSG_SPACE(64 * _INT.size)  # that come with the bytes of one read
# As numbers: the module's own are members of an enum, whose operators take microseconds.
AT_ONCE = int(socket.MSG_DONTWAIT)
_CLOSING = int(socket.MSG_CMSG_CLOEXEC)


class Reader:
    """The receiving half of a data connection, for one thread at a time.

    Args:
        connection: A connected socket, after the handshake.
        mpi: Receives large arrays of other ranks of the same MPI job; None if there is none.

    Attributes:
        heard: The time of the latest bytes (`time.monotonic()` seconds).
        listens: Whether a thread waits for bytes; while none does, none are heard.
    """

    def __init__(self, connection: socket.socket, mpi: MpiMessages | None = None) -> None:
        self._socket, self._mpi = connection, mpi
        self._is_local = connection.family == socket.AF_UNIX
        self._segments = segments.Receiver()
        self._descriptors: list[int] = []  # of segments, which have come and are not mapped yet
        self._buffer = bytearray()
        self.heard = time.monotonic()
        self.listens = False

    def read(self, flags: int = 0) -> tuple[Frame, list[np.ndarray]]:
        """Read one frame.

        Args:
            flags: `AT_ONCE` to read only what has come.

        Raises:
            BlockingIOError: Not a byte has come, and the socket has a timeout or may not wait.
            EOFError: The other end has closed the connection.
            OSError: The connection has failed.
            Exception: The bytes are no frame, or there is no memory for them.
        """
        if not self._buffer:
            self._receive(flags)
        if len(self._buffer) < HEAD.size:
            self._await(HEAD.size)
        length, kind, request, step = HEAD.unpack_from(self._buffer)
        if length > frames.MOST_BYTES:
            raise ValueError(f"it sent a frame of {length} bytes")
        at = HEAD.size + length
        if len(self._buffer) < at:
            self._await(at)
        about, announced = frames.parse(bytes(self._buffer[HEAD.size : at]))
        arrays = []
        for each in announced:
            behind = at + each.nbytes
            if each.elsewhere is None and at < behind <= len(self._buffer):
                arrays.append(np.ndarray(each.shape, each.dtype, self._buffer[at:behind]))
                at = behind
                continue
            del self._buffer[:at]
            at = 0
            arrays.append(self._large(each))
        del self._buffer[:at]
        return Frame(kind, about, request, step), arrays

    def close(self) -> None:
        """Close the descriptors that have come and are not mapped."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _large(self, announced: Announced) -> np.ndarray:
        """Read an array that is not whole in the buffer, or whose bytes are elsewhere."""
        dtype, shape, elsewhere = announced.dtype, announced.shape, announced.elsewhere
        if elsewhere is not None and elsewhere.segment:
            return self._shared(elsewhere, dtype, shape)
        array = np.empty(shape, dtype)
        if elsewhere is not None:
            if self._mpi is None:
                raise ValueError("it sent an array by MPI, which this process does not use")
            self._mpi.receive(array, elsewhere.by_mpi - 1, elsewhere.mpi_tag)
        elif array.nbytes:
            self._fill(array.reshape(-1).view(np.uint8).data)
        return array

    def _shared(self, header: pb.Array, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array in shared memory, whose descriptor came with the frame if it is new."""
        if header.is_new:
            if not self._descriptors:
                raise ValueError("it sent no descriptor; is the limit of open files reached?")
            self._segments.add(header.segment, self._descriptors.pop(0))
        return self._segments.view(header.segment, dtype, shape)

    def _receive(self, flags: int = 0) -> None:
        """Add bytes to the buffer."""
        self.listens = True
        if self._is_local:
            received, rights, *_ = self._socket.recvmsg(
                _BUFFER_BYTES, _RIGHTS_BYTES, flags | _CLOSING
            )
            for *_, packed in rights:
                self._descriptors += (each for (each,) in _INT.iter_unpack(packed))
        else:
            received = self._socket.recv(_BUFFER_BYTES, flags)
        self.heard, self.listens = time.monotonic(), False
        if not received:
            raise EOFError
        self._buffer += received

    def _await(self, count: int) -> None:
        """Wait until the buffer has `count` bytes: the other end is in the middle of a frame."""
        while len(self._buffer) < count:
            with contextlib.suppress(BlockingIOError):
                self._receive()

    def _fill(self, target: memoryview) -> None:
        """Read exactly a target's bytes."""
        ready = min(len(self._buffer), len(target))
        target[:ready] = self._buffer[:ready]
        del self._buffer[:ready]
        while ready < len(target):
            self.listens = True
            try:
                received = self._socket.recv_into(target[ready:])
            except BlockingIOError:
                continue
            self.heard, self.listens = time.monotonic(), False
            if not received:
                raise EOFError
            ready += received
