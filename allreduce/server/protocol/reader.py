"""Reads frames and their arrays from the socket of a data connection."""

from __future__ import annotations

import socket
import time

import numpy as np

from allreduce._native import FrameSocket
from allreduce.server.protocol import segments
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.frames import Announced, Frame
from allreduce.server.protocol.mpi_messages import MpiMessages

# As a number: the module's own is a member of an enum, whose operators take microseconds.
AT_ONCE = int(socket.MSG_DONTWAIT)


class Reader:
    """The receiving half of a data connection, for one thread at a time.

    Native code reads frames and small arrays.

    Args:
        connection: A connected socket, after the handshake.
        frames: Its native half.
        mpi: Receives large arrays of other ranks of the same MPI job; None if there is none.
    """

    def __init__(
        self, connection: socket.socket, frames: FrameSocket, mpi: MpiMessages | None = None
    ) -> None:
        self._socket, self._frames, self._mpi = connection, frames, mpi
        self._segments = segments.Receiver()
        self._listens = False  # whether a thread waits for bytes of a large array

    @property
    def listens(self) -> bool:
        """Whether a thread waits for bytes; while none does, none are heard."""
        return self._listens or self._frames.listens

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
        kind, request, step, about, arrays, is_whole = self._frames.read(flags)
        if not is_whole:
            for index, each in enumerate(arrays):
                if isinstance(each, Announced):
                    arrays[index] = self._large(each)
        return Frame(kind, about, request, step), arrays

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
            self._fill(array)
        return array

    def _shared(self, header: pb.Array, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array in shared memory, whose descriptor came with the frame if it is new."""
        if header.is_new:
            descriptor = self._frames.take_descriptor()
            if descriptor < 0:
                raise ValueError("it sent no descriptor; is the limit of open files reached?")
            self._segments.add(header.segment, descriptor)
        return self._segments.view(header.segment, dtype, shape)

    def _fill(self, array: np.ndarray) -> None:
        """Read exactly an array's bytes."""
        target, ready = array.reshape(-1).view(np.uint8).data, self._frames.take(array)
        while ready < len(target):
            self._listens = True
            try:
                received = self._socket.recv_into(target[ready:])
            except BlockingIOError:
                continue
            self._frames.heard, self._listens = time.monotonic(), False
            if not received:
                raise EOFError
            ready += received
