"""Reads frames and their arrays from the socket of a data connection."""

from __future__ import annotations

import socket

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

    Native code reads the socket; arrays may come in shared memory or by MPI instead.

    Args:
        frames: Reads a connected socket, after the handshake.
        mpi: Receives large arrays of other ranks of the same MPI job; None if there is none.
    """

    def __init__(self, frames: FrameSocket, mpi: MpiMessages | None = None) -> None:
        self._frames, self._mpi = frames, mpi
        self._segments = segments.Receiver()

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
        else:
            self._frames.fill(array)
        return array

    def _shared(self, header: pb.Array, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array in shared memory, whose descriptor came with the frame if it is new."""
        if header.is_new:
            descriptor = self._frames.take_descriptor()
            if descriptor < 0:
                raise ValueError("it sent no descriptor; is the limit of open files reached?")
            self._segments.add(header.segment, descriptor)
        return self._segments.view(header.segment, dtype, shape)
