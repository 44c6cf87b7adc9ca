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
from allreduce.server.protocol.frames import Frame

Received = queue.Queue[Sequence[np.ndarray]]


@dataclass
class Ends:
    """A connection's two ends, and what the second one receives.

    Attributes:
        frames: The frames that have come, the latest last.
        reasons: Why the second one was lost.
    """

    sender: Channel
    receiver: Channel
    received: Received
    frames: list[Frame]
    reasons: queue.Queue[str]

    def send(self, *arrays: np.ndarray) -> None:
        """Send a frame with arrays."""
        self.sender.send(Frame(pb.TENSOR), arrays)


@contextlib.contextmanager
def connected(handle: object = None) -> Iterator[Ends]:
    """Connect two ends.

    Args:
        handle: Called with the arrays that come; None to collect them.
    """
    first, second = socket.socketpair(socket.AF_UNIX)
    received: Received = queue.Queue()
    reasons: queue.Queue[str] = queue.Queue()
    frames: list[Frame] = []
    taken = handle if callable(handle) else received.put

    def take(_: Channel, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        frames.append(frame)
        taken(arrays)

    def lose(_: Channel, why: str) -> None:
        reasons.put(why)

    sender = Channel(first, "b", lambda *_: None, lambda *_: None)
    receiver = Channel(second, "a", take, lose)
    try:
        yield Ends(sender, receiver, received, frames, reasons)
    finally:
        sender.leave()
        receiver.leave()
