"""Reads the arrays of a data connection that do not come whole with their frame."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce._native import FrameSocket
from allreduce.server.protocol import segments
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.frames import Announced
from allreduce.server.protocol.mpi_messages import MpiMessages


class Reader:
    """Reads large arrays, for one thread at a time: from the socket, shared memory, or by MPI.

    Args:
        frames: Reads a connected socket, after the handshake.
        mpi: Receives large arrays of other ranks of the same MPI job; None if there is none.
    """

    def __init__(self, frames: FrameSocket, mpi: MpiMessages | None = None) -> None:
        self._frames, self._mpi = frames, mpi
        self._segments = segments.Receiver()

    def complete(self, arrays: list[Any]) -> None:
        """Replace what a frame has announced of its arrays by the arrays.

        Raises:
            EOFError: The other end has closed the connection.
            OSError: The connection has failed.
            Exception: The arrays are not where they should be, or there is no memory for them.
        """
        for index, each in enumerate(arrays):
            if isinstance(each, Announced):
                arrays[index] = self._large(each)

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
