"""Two ends of a data connection in one process."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.channel import Channel

Received = queue.Queue[Sequence[np.ndarray]]


@dataclass
class Ends:
    """A connection's two ends, and what the second one receives.

    Attributes:
        reasons: Why each of the ends was lost.
    """

    sender: Channel
    receiver: Channel
    received: Received
    reasons: queue.Queue[str]

    def send(self, *arrays: np.ndarray) -> pb.Frame:
        """Send a frame with arrays; returns it."""
        frame = pb.Frame(kind=pb.Frame.TENSOR)
        self.sender.send(frame, arrays)
        return frame


@contextlib.contextmanager
def connected(handle: object = None) -> Iterator[Ends]:
    """Connect two ends.

    Args:
        handle: Called with the arrays that come; None to collect them.
    """
    first, second = socket.socketpair(socket.AF_UNIX)
    received: Received = queue.Queue()
    reasons: queue.Queue[str] = queue.Queue()
    taken = handle if callable(handle) else received.put

    def lose(_: Channel, why: str) -> None:
        reasons.put(why)

    sender = Channel(first, "b", lambda *_: None, lose)
    receiver = Channel(second, "a", lambda _, __, arrays: taken(arrays), lose)
    try:
        yield Ends(sender, receiver, received, reasons)
    finally:
        sender.leave()
        receiver.leave()
