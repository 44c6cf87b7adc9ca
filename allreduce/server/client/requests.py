"""A client's connections to the tasks of a cluster."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

import allreduce.errors as errors
from allreduce.errors import AllreduceError, PeerLostError, TimeoutError
from allreduce.events import logger
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.channel import Answer, Channel
from allreduce.server.protocol.connect import Peer
from allreduce.server.protocol.frames import Frame


class Requests:
    """Connects a client to tasks, and makes errors of their answers.

    Args:
        name: The client's name.
        secret: The cluster's secret.
        timeout: Seconds to wait for a task that is not up yet, and for an answer.
    """

    def __init__(self, name: str, secret: bytes, timeout: float) -> None:
        self._name, self._secret, self._timeout = name, secret, timeout
        self._channels: dict[str, Channel] = {}  # by task
        self._generations: dict[str, int] = {}  # of tasks, when they were last connected to
        self._lost: set[str] = set()  # tasks whose connection has ended
        self._closed = False

    def close(self) -> None:
        """Close all connections; the tasks release the client's graphs."""
        self._closed = True
        for channel in list(self._channels.values()):
            channel.leave()

    def channel(self, task: str, address: str, timeout: float | None = None) -> Channel:
        """Return the data connection to a task; opens a new one if it was lost.

        `timeout` is the time in seconds for that, by default the session's.
        """
        known = self._channels.get(task)
        if known is not None and not known.ended:
            return known
        limit = self._timeout if timeout is None else timeout
        peer = Peer(address, self._secret, limit, task)
        channel = peer.open(self._name, None, self._lose)
        peer.close()
        self._channels[task] = channel
        self._note_found(task, peer.hello.generation)
        return channel

    def _note_found(self, task: str, generation: int) -> None:
        """Note that a task lives; say so if it was lost."""
        before = self._generations.get(task, generation)
        self._generations[task] = generation
        if task in self._lost and before == generation:
            logger.info("[server] %s is back", task)
        elif task in self._lost:
            logger.warning(
                "[server] %s is back after a restart: its variables, and the state of optimizers "
                "(slots, numbers of updates) that belongs to them, have to be set again",
                task,
            )
        self._lost.discard(task)

    def ask(
        self, task: str, address: str, frame: Frame, arrays: Sequence[np.ndarray] = ()
    ) -> tuple[Frame, Sequence[np.ndarray]]:
        """Send one request to a task; returns the answer."""
        channel = self.channel(task, address)
        return self.result(channel, channel.request(frame, arrays))

    def result(self, channel: Channel, reply: Answer) -> tuple[Frame, Sequence[np.ndarray]]:
        """Wait for an answer.

        Raises:
            TimeoutError: The task has not answered in time.
            PeerLostError: The task was lost.
            Exception: The error that the task has answered with.
        """
        channel.wait(reply, self._timeout)
        self.check(channel, reply)
        assert reply.frame is not None
        return reply.frame, reply.arrays

    def check(self, channel: Channel, reply: Answer) -> None:
        """Raise what is wrong with an answer, as `result` does without waiting."""
        if not reply.came:
            raise TimeoutError(
                f"[server] {channel.peer} has not answered within {self._timeout:g} s"
            )
        if reply.frame is None:
            raise PeerLostError(f"[server] {channel.peer} is lost: {reply.lost}")
        if reply.frame.kind == pb.FAILED:
            raise_failure(reply.frame.about, f"raised by {channel.peer}")

    def _lose(self, channel: Channel, why: str) -> None:
        if not self._closed:
            self._lost.add(channel.peer)
            logger.warning("[server] the session has lost %s: %s", channel.peer, why)


def raise_failure(about: pb.Description, *notes: str) -> NoReturn:
    """Raise the error that a task has answered with; `notes` and its traceback become a note.

    A Python error of a user's kernel has the type that it would have in one process, if the type
    can be constructed from a text.
    """
    error = _made(about.error_kind, about.error)
    if notes or about.names:
        error.add_note("\n".join([*notes, *about.names]))
    raise error


def _made(kind: str, text: str) -> Exception:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, AllreduceError):
        return found(text)
    if kind == "StaleError":
        return PeerLostError(text)
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        with contextlib.suppress(TypeError):  # a UnicodeDecodeError takes more than a text
            return found(text)
    return RuntimeError(f"{kind}: {text}")
