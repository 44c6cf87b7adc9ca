"""A data connection between two processes of a cluster: frames, followed by their arrays.

Between tasks of one host, large arrays are in shared memory instead (`segments`). The connection
is a socket of its own rather than gRPC: a round trip of an empty frame takes 50 µs between two
processes on two cores, a gRPC call 350.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from allreduce._native import FrameSocket
from allreduce.errors import PeerLostError, UnsupportedError
from allreduce.events import logger
from allreduce.graph.core.host_future import Output
from allreduce.server.protocol import frames, mpi_messages, segments
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.frames import Frame
from allreduce.server.protocol.mpi_messages import MpiMessages
from allreduce.server.protocol.reader import Reader

BEAT_SECONDS = 2.0
DEAD_SECONDS = 6.0  # without a byte

# As a number: the module's own is a member of an enum, whose operators take microseconds.
AT_ONCE = int(socket.MSG_DONTWAIT)

_LOCAL_BYTES = 1 << 20  # that a Unix socket holds; with the kernel's 208 KiB it wakes too often
_TURN_SECONDS = 0.005  # until a waiting thread looks again whether another has read its answer
_PAUSE_SECONDS = 0.05  # of a client's read, until it looks at its deadline and at other tasks
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_INT = struct.Struct("i")  # a descriptor
_MOST_PARTS = 1024  # of one call of sendmsg (IOV_MAX)
_JOINED_BYTES = 1 << 10  # of an array that is copied, which takes less time than a view
_READERS = 2  # one reads while the other runs a step; see `Channel`

Handle = Callable[["Channel", Frame, Sequence[np.ndarray]], None]


@dataclass(slots=True)
class Answer:
    """The answer that a request waits for.

    Attributes:
        came: Whether the other attributes are set.
        frame: The answer; None if the connection has ended.
        lost: Why it has ended.
    """

    came: bool = False
    frame: Frame | None = None
    arrays: Sequence[np.ndarray] = ()
    lost: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the other end has answered with an error, or was lost."""
        return self.came and (self.frame is None or self.frame.kind == pb.FAILED)


class Channel:
    """One authenticated connection; sends are safe from several threads.

    At a task, the thread that has read a frame handles it, so nothing is handed from thread to
    thread. A frame that may take long is handled after `hand_over`: another thread reads meanwhile,
    so an abort or a lost connection is noticed during a step. A client's connection has no such
    threads: the thread that waits for an answer reads it.

    Args:
        connection: A connected socket, after the handshake.
        peer: The other end's name, for messages.
        handle: Called with each frame and its arrays, but heartbeats; None for a client, to which
            nothing comes but answers.
        lost: Called once, with the reason, when the connection has ended.
        mpi: Receives large arrays of other ranks of the same MPI job; None if there is none.
        mpi_rank: The other end's rank, if large arrays are sent so.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        handle: Handle | None,
        lost: Callable[[Channel, str], None],
        *,
        mpi: MpiMessages | None = None,
        mpi_rank: int | None = None,
    ) -> None:
        self.peer = peer
        self._mpi, self._mpi_rank = mpi, mpi_rank
        self._mpi_tag = secrets.randbelow(mpi_messages.TAGS)
        self._socket = connection
        self._handle, self._lost = handle, lost
        self._reading, self._sending, self._ending = (threading.Lock() for _ in range(3))
        self._thread = 0  # that holds `_reading`, of those in the background
        self._is_local = connection.family == socket.AF_UNIX
        self._frames = FrameSocket(connection.fileno(), frames.parse, frames.announce)
        self._sent, self._reader = segments.Sender(), Reader(self._frames, mpi)
        self._numbers = itertools.count(1)  # of requests
        self._answers: dict[int, Answer] = {}  # that have not come yet, by request
        self.ended = ""  # why, once it has
        self.was_interrupted = False  # whether Ctrl-C in this process has ended it
        self.has_left = False  # whether the other end has closed it in good order
        if self._is_local:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BYTES)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        if handle is None:  # a system call less than polling before each read
            pause = _TIMEVAL.pack(0, round(_PAUSE_SECONDS * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pause)
        for work in (*([] if handle is None else [self._read] * _READERS), self._beat):
            threading.Thread(target=work, name=f"allreduce-{peer}", daemon=True).start()

    def send(self, frame: Frame, arrays: Sequence[Output] = ()) -> None:
        """Send a frame with arrays, which may change as soon as this returns.

        Raises:
            PeerLostError: The connection has ended.
            UnsupportedError: An array has a dtype that does not travel; nothing is sent.
        """
        about, given = frame.about.SerializeToString(), [*arrays]
        kind, request, step = frame.kind, frame.request, frame.step
        try:
            with self._sending:
                if self._frames.send_small(kind, request, step, about, given):
                    return
        except BaseException as error:
            self._fail_sending(error)
        whole = self._checked(given)
        try:
            with self._sending:
                self._send(frame, about, whole)
        except BaseException as error:
            self._fail_sending(error)

    def _fail_sending(self, error: BaseException) -> NoReturn:
        """End the connection, of whose last frame the other end may have half, and raise why."""
        if isinstance(error, OSError):
            self.end(f"sending failed: {error.strerror or error}")
            raise PeerLostError(f"{self.peer} is lost: {self.ended}") from error
        self.was_interrupted = isinstance(error, KeyboardInterrupt)
        self.end(f"sending was ended by {type(error).__name__}")
        raise error

    def _checked(self, arrays: Sequence[Output]) -> list[np.ndarray]:
        """Return arrays on the host, in one piece each; refuses those that do not travel."""
        whole = []
        for given in arrays:
            array = np.asarray(given, order="C")
            if array.dtype.kind not in frames.KINDS:
                raise UnsupportedError(
                    f"[server] an array of {array.dtype} does not travel to {self.peer}; cast it "
                    "to a type of NumPy's own first"
                )
            whole.append(array)
        return whole

    def _send(self, frame: Frame, described: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Send a frame with arrays of any size; large ones are not copied."""
        parts: list[Any] = []
        messages: list[np.ndarray] = []
        descriptors: list[int] = []
        try:
            for each in arrays:
                if each.nbytes <= _JOINED_BYTES:
                    described += frames.announce(each.dtype, each.shape)
                    parts.append(each.tobytes())
                elif (elsewhere := self._elsewhere(each, messages, descriptors)) is not None:
                    described += pb.Description(arrays=[elsewhere]).SerializeToString()
                else:
                    described += frames.announce(each.dtype, each.shape)
                    parts.append(each.reshape(-1).view(np.uint8).data)
            head = FrameSocket.head(len(described), frame.kind, frame.request, frame.step)
            _send_all(self._socket, [head, described, *parts], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for each in messages:
            assert self._mpi is not None
            assert self._mpi_rank is not None
            self._mpi.send(each, self._mpi_rank, self._mpi_tag)

    def reserve(self, nbytes: int) -> np.ndarray | None:
        """Return memory of which `send` need not copy an array; None if there is none."""
        if self._mpi_rank is None and self._is_local and nbytes >= segments.SMALLEST:
            with contextlib.suppress(OSError):
                return self._sent.reserve(nbytes)
        return None

    def _elsewhere(
        self, array: np.ndarray, messages: list[np.ndarray], descriptors: list[int]
    ) -> pb.Array | None:
        """Put a large array into shared memory or a message of MPI; None if neither takes it."""
        if self._mpi_rank is not None and array.nbytes >= mpi_messages.SMALLEST:
            assert self._mpi is not None
            messages.append(array)
            return pb.Array(
                dtype=array.dtype.str,
                shape=array.shape,
                by_mpi=self._mpi.rank + 1,
                mpi_tag=self._mpi_tag,
            )
        if self._is_local and array.nbytes >= segments.SMALLEST:
            with contextlib.suppress(OSError):  # no memory for a segment: the socket needs none
                if (found := self._sent.put(array)) is not None:
                    segment, descriptor = found
                    descriptors += [] if descriptor is None else [descriptor]
                    return pb.Array(
                        dtype=array.dtype.str,
                        shape=array.shape,
                        segment=segment.number,
                        is_new=descriptor is not None,
                    )
        return None

    def request(self, frame: Frame, arrays: Sequence[np.ndarray] = ()) -> Answer:
        """Send a request; returns its answer, which has not come yet.

        Raises:
            PeerLostError, UnsupportedError: As of `send`.
        """
        frame.request = next(self._numbers)
        answer = self._answers[frame.request] = Answer()
        self.send(frame, arrays)
        return answer

    def wait(self, answer: Answer, timeout: float) -> bool:
        """Read until an answer has come, or the connection has ended; returns whether it has.

        A thread may wait `_PAUSE_SECONDS` longer than `timeout`, but with 0 it does not wait.
        """
        deadline = time.monotonic() + timeout
        flags = 0 if timeout > 0 else AT_ONCE
        while not answer.came:
            if self._reading.acquire(timeout=_TURN_SECONDS):  # another waiting thread may read
                try:
                    if not answer.came:
                        self._read_one(flags)
                finally:
                    self._reading.release()
            if time.monotonic() >= deadline:
                break
        return answer.came

    def leave(self) -> None:
        """Close the connection in good order: the other end does not warn of it."""
        with contextlib.suppress(PeerLostError):
            self.send(Frame(pb.LEAVE))
        self.end("this end has closed the connection")

    def end(self, why: str) -> None:
        """Close the connection; the first call's reason counts."""
        with self._ending:
            if self.ended:
                return
            self.ended = why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._frames.close()
        self._socket.close()
        self._sent.close()
        self._lost(self, why)
        for request in list(self._answers):
            answer = self._answers.pop(request, None)
            if answer is not None:
                answer.lost, answer.came = why, True

    def _beat(self) -> None:
        while not self.ended:
            began = time.monotonic()
            time.sleep(BEAT_SECONDS)
            # With this process, the other end may have been suspended, and needs time to send.
            was_suspended = time.monotonic() - began > 2 * BEAT_SECONDS
            if self._handle is None:
                self._read_idle()
            if was_suspended or (self._handle is not None and not self._frames.listens):
                self._frames.heard = time.monotonic()
            silent = time.monotonic() - self._frames.heard
            if silent > DEAD_SECONDS:
                self.end(f"it has sent nothing for {silent:.0f} s")
                return
            with contextlib.suppress(PeerLostError):
                self.send(Frame(pb.HEARTBEAT))

    def _read_idle(self) -> None:
        """Read what has come while nobody waits for an answer."""
        while not self.ended and self._reading.acquire(blocking=False):
            try:
                if not self._read_one(AT_ONCE):
                    return
            finally:
                self._reading.release()

    def hand_over(self) -> None:
        """Let the other thread read while this one handles a frame, which may take long.

        Waking it takes as long as a small step, so frames that are quickly handled do without.
        """
        if self._thread == threading.get_ident():
            self._thread = 0
            self._reading.release()

    def _read(self) -> None:
        own = threading.get_ident()
        assert self._handle is not None
        while not self.ended:
            if self._thread != own:
                self._reading.acquire()
                self._thread = own
            received = self._receive()
            if received is None:
                continue
            try:
                self._handle(self, *received)
            except Exception as error:
                logger.exception("[server] a frame of %s could not be handled", self.peer)
                self.end(f"{type(error).__name__}: {error}")
            del received  # arrays in shared memory, which the other end may use again
        self.hand_over()

    def _read_one(self, flags: int) -> bool:
        """Read an answer; returns whether a frame has come."""
        if self.ended:
            time.sleep(_TURN_SECONDS)  # another thread is telling those who wait
            return False
        try:
            received = self._receive(flags)
        except BlockingIOError:
            return False
        if received is not None:
            frame, arrays = received
            answer = self._answers.pop(frame.request, None)
            if answer is not None:
                answer.frame, answer.arrays, answer.came = frame, arrays, True
        return True

    def _receive(self, flags: int = 0) -> tuple[Frame, list[np.ndarray]] | None:
        """Read one frame; returns None of a heartbeat, and of the connection's end.

        Raises:
            BlockingIOError: Not a byte has come, and the socket has a timeout or may not wait.
        """
        try:
            kind, request, step, about, arrays, is_whole = self._frames.read(flags)
            if not is_whole:
                self._reader.complete(arrays)
        except BlockingIOError:
            raise
        except Exception as error:  # whatever the bytes are, and where there is no memory for them
            self.end(str(error) or "it has closed the connection")
            return None
        except BaseException as error:  # Ctrl-C in the middle of a frame
            self.was_interrupted = isinstance(error, KeyboardInterrupt)
            self.end(f"receiving was ended by {type(error).__name__}")
            raise
        if kind == pb.LEAVE:
            self.has_left = True
            self.end("it has left")
        elif kind != pb.HEARTBEAT:
            return Frame(kind, about, request, step), arrays
        return None


def _send_all(connection: socket.socket, parts: list[Any], descriptors: Sequence[int]) -> None:
    """Send all parts, in as few calls as the kernel allows; descriptors go with the first."""
    beside = []
    if descriptors:
        rights = b"".join(map(_INT.pack, descriptors))
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    while parts:
        sent = connection.sendmsg(parts[:_MOST_PARTS], beside)
        beside = []
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = memoryview(parts[0])[sent:]
