"""A data connection between two processes of a cluster: frames, followed by their arrays.

Between tasks of one host, large arrays are in shared memory instead (`segments`). The connection
is a socket of its own rather than gRPC: a round trip of an empty frame takes 50 µs between two
processes on two cores, a gRPC call 350.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.errors import PeerLostError, UnsupportedError
from allreduce.events import logger
from allreduce.server.protocol import frames, mpi_messages, segments
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.frames import Announced, Frame
from allreduce.server.protocol.mpi_messages import MpiMessages

BEAT_SECONDS = 2.0
DEAD_SECONDS = 6.0  # without a byte

_BUFFER_BYTES = 1 << 16
_LOCAL_BYTES = 1 << 20  # that a Unix socket holds; with the kernel's 208 KiB it wakes too often
_TURN_SECONDS = 0.005  # until a waiting thread looks again whether another has read its answer
_PAUSE_SECONDS = 0.5  # of a wait, until it looks whether the connection has ended
_INT = struct.Struct("i")  # a descriptor
_RIGHTS_BYTES = socket.CMSG_SPACE(64 * _INT.size)  # that come with the bytes of one read
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

    def fill(self, frame: Frame | None, arrays: Sequence[np.ndarray], lost: str = "") -> None:
        """Set all of it."""
        self.frame, self.arrays, self.lost = frame, arrays, lost
        self.came = True


class Channel:
    """One authenticated connection; sends are safe from several threads.

    The thread that has read a frame handles it, so nothing is handed from thread to thread. A frame
    that may take long is handled after `hand_over`: another thread reads meanwhile, so an abort or
    a lost connection is noticed during a step. A client's connection has no such threads: the
    thread that waits for an answer reads it.

    Args:
        connection: A connected socket, after the handshake.
        peer: The other end's name, for messages.
        handle: Called with each frame and its arrays, but heartbeats.
        lost: Called once, with the reason, when the connection has ended.
        is_clients: Whether threads read in `wait` instead of in the background.
        mpi: Receives large arrays of other ranks of the same MPI job; None if there is none.
        mpi_rank: The other end's rank, if large arrays are sent so.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        handle: Handle,
        lost: Callable[[Channel, str], None],
        *,
        is_clients: bool = False,
        mpi: MpiMessages | None = None,
        mpi_rank: int | None = None,
    ) -> None:
        self.peer = peer
        self._mpi, self._mpi_rank = mpi, mpi_rank
        self._mpi_tag = secrets.randbelow(mpi_messages.TAGS)
        self._is_clients = is_clients
        self._socket = connection
        self._handle, self._lost = handle, lost
        self._reading, self._sending, self._ending = (threading.Lock() for _ in range(3))
        self._reader = 0  # the thread that holds `_reading`, of those in the background
        self._is_local = connection.family == socket.AF_UNIX
        self._sent, self._received = segments.Sender(), segments.Receiver()
        self._descriptors: list[int] = []  # of segments, which have come and are not mapped yet
        self._buffer = bytearray()
        self.ended = ""  # why, once it has
        self.has_left = False  # whether the other end has closed it in good order
        self._heard = time.monotonic()
        self._listening = False  # whether a thread waits for bytes; while none does, none are heard
        if self._is_local:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BYTES)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._ready = select.poll()
        self._ready.register(connection, select.POLLIN)
        for work in (*([] if is_clients else [self._read] * _READERS), self._beat):
            threading.Thread(target=work, name=f"allreduce-{peer}", daemon=True).start()

    def send(self, frame: Frame, arrays: Sequence[np.ndarray] = ()) -> None:
        """Send a frame with arrays, which may change as soon as this returns.

        Raises:
            PeerLostError: The connection has ended.
            UnsupportedError: An array has a dtype that does not travel; nothing is sent.
        """
        whole = [np.asarray(each, order="C") for each in arrays]
        for each in whole:
            if each.dtype.kind not in frames.KINDS:
                raise UnsupportedError(
                    f"[server] an array of {each.dtype} does not travel to {self.peer}; cast it "
                    "to a type of NumPy's own first"
                )
        try:
            with self._sending:
                self._send(frame, whole)
        except OSError as error:
            self.end(f"sending failed: {error.strerror or error}")
            raise PeerLostError(f"{self.peer} is lost: {self.ended}") from error
        except BaseException as error:  # Ctrl-C: the other end may have half of a frame
            self.end(f"sending was ended by {type(error).__name__}")
            raise

    def _send(self, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        description = [frame.about.SerializeToString()]
        parts: list[Any] = []
        messages: list[np.ndarray] = []
        descriptors: list[int] = []
        try:
            for each in arrays:
                elsewhere = self._elsewhere(each, messages, descriptors)
                if elsewhere is not None:
                    description.append(pb.Description(arrays=[elsewhere]).SerializeToString())
                    continue
                description.append(frames.announce(each.dtype, each.shape))
                small = each.nbytes <= _JOINED_BYTES
                parts.append(each.tobytes() if small else each.reshape(-1).view(np.uint8).data)
            described = b"".join(description)
            head = frames.HEAD.pack(len(described), frame.kind, frame.request, frame.step)
            _send_all(self._socket, [head + described, *parts], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for each in messages:
            assert self._mpi is not None
            assert self._mpi_rank is not None
            self._mpi.send(each, self._mpi_rank, self._mpi_tag)

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

    def wait(self, answer: Answer, timeout: float) -> bool:
        """Read frames until an answer has come; returns whether it has.

        `handle` fills it, or `lost` when the connection ends.
        """
        deadline = time.monotonic() + timeout
        while not answer.came and time.monotonic() < deadline:
            if self._reading.acquire(timeout=_TURN_SECONDS):  # another waiting thread may read
                try:
                    if not answer.came:
                        self._read_one(min(deadline - time.monotonic(), _PAUSE_SECONDS))
                finally:
                    self._reading.release()
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
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        self._lost(self, why)

    def _beat(self) -> None:
        while not self.ended:
            time.sleep(BEAT_SECONDS)
            if self._is_clients:
                self._read_idle()
            silent = time.monotonic() - self._heard
            if (self._listening or self._is_clients) and silent > DEAD_SECONDS:
                self.end(f"it has sent nothing for {silent:.0f} s")
                return
            with contextlib.suppress(PeerLostError):
                self.send(Frame(pb.HEARTBEAT))

    def _read_idle(self) -> None:
        """Read what has come while nobody waits for an answer."""
        while not self.ended and self._reading.acquire(blocking=False):
            try:
                if not self._read_one(0.0):
                    return
            finally:
                self._reading.release()

    def hand_over(self) -> None:
        """Let the other thread read while this one handles a frame, which may take long.

        Waking it takes as long as a small step, so frames that are quickly handled do without.
        """
        if self._reader == threading.get_ident():
            self._reader = 0
            self._reading.release()

    def _read(self) -> None:
        own = threading.get_ident()
        while not self.ended:
            if self._reader != own:
                self._reading.acquire()
                self._reader = own
            received = self._receive()
            if received is not None:
                self._pass_on(*received)
            del received  # arrays in shared memory, which the other end may use again
        self.hand_over()

    def _pass_on(self, frame: Frame, arrays: list[np.ndarray]) -> None:
        """Handle a frame; what goes wrong there ends the connection, and is logged."""
        try:
            self._handle(self, frame, arrays)
        except Exception as error:
            logger.exception("[server] a frame of %s could not be handled", self.peer)
            self.end(f"{type(error).__name__}: {error}")

    def _read_one(self, seconds: float) -> bool:
        """Read and handle a frame that comes within some time; returns whether one came."""
        if self.ended:
            time.sleep(_TURN_SECONDS)  # another thread is telling those who wait
            return False
        if not (self._buffer or self._ready.poll(max(seconds, 0.0) * 1000)):
            return False
        received = self._receive()
        if received is not None:
            self._pass_on(*received)
        return True

    def _receive(self) -> tuple[Frame, list[np.ndarray]] | None:
        """Read one frame; returns None of a heartbeat, and of the connection's end."""
        try:
            frame, arrays = self._next()
        except Exception as error:  # whatever the bytes are, and where there is no memory for them
            self.end(str(error) or "it has closed the connection")
            return None
        except BaseException as error:  # Ctrl-C in the middle of a frame
            self.end(f"receiving was ended by {type(error).__name__}")
            raise
        if frame.kind == pb.LEAVE:
            self.has_left = True
            self.end("it has left")
        elif frame.kind != pb.HEARTBEAT:
            return frame, arrays
        return None

    def _next(self) -> tuple[Frame, list[np.ndarray]]:
        length, kind, request, step = frames.HEAD.unpack(self._take(frames.HEAD.size))
        if length > frames.MOST_BYTES:
            raise ValueError(f"it sent a frame of {length} bytes")
        about, announced = frames.parse(bytes(self._take(length)))
        return Frame(kind, about, request, step), [self._array(each) for each in announced]

    def _array(self, announced: Announced) -> np.ndarray:
        """Read one of the arrays that a frame announces."""
        dtype, shape, elsewhere = announced.dtype, announced.shape, announced.elsewhere
        if elsewhere is None and 0 < announced.nbytes <= len(self._buffer):
            return np.frombuffer(self._take(announced.nbytes), dtype).reshape(shape)
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
            self._received.add(header.segment, self._descriptors.pop(0))
        return self._received.view(header.segment, dtype, shape)

    def _take(self, count: int) -> bytearray:
        """Read exactly `count` bytes, through the buffer."""
        while len(self._buffer) < count:
            self._heard, self._listening = time.monotonic(), True
            if self._is_local:
                received, rights, *_ = self._socket.recvmsg(
                    _BUFFER_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
                )
                for *_, packed in rights:
                    self._descriptors += (each for (each,) in _INT.iter_unpack(packed))
            else:
                received = self._socket.recv(_BUFFER_BYTES)
            self._heard, self._listening = time.monotonic(), False
            if not received:
                raise EOFError
            self._buffer += received
        taken = self._buffer[:count]
        del self._buffer[:count]
        return taken

    def _fill(self, target: memoryview) -> None:
        """Read exactly a target's bytes."""
        ready = min(len(self._buffer), len(target))
        target[:ready] = self._buffer[:ready]
        del self._buffer[:ready]
        while ready < len(target):
            self._heard, self._listening = time.monotonic(), True
            received = self._socket.recv_into(target[ready:])
            self._heard, self._listening = time.monotonic(), False
            if not received:
                raise EOFError
            ready += received


def _send_all(connection: socket.socket, parts: list[Any], descriptors: Sequence[int]) -> None:
    """Send all parts, in as few calls as the kernel allows; descriptors go with the first."""
    rights = [_INT.pack(each) for each in descriptors]
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(rights))] if rights else []
    while parts:
        sent = connection.sendmsg(parts[:_MOST_PARTS], beside)
        beside = []
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = memoryview(parts[0])[sent:]
