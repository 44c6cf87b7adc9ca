"""A member's connection to the group leader."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator

from allreduce.cluster.host.address import unanswered
from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.leader.rpc import BEAT_SECONDS, CHANNEL_OPTIONS, LEFT, grpc, leader_pb2_grpc
from allreduce.cluster.process import forks
from allreduce.cluster.store import SilentError

_GOODBYE_SECONDS = 2.0


class LeaderChannel:
    """One open call to the leader: matches answers to requests and sends heartbeats when idle.

    It connects in the background, as soon as there is a leader.

    Args:
        silence: Seconds without a message after which the leader counts as lost.
    """

    def __init__(self, address: str, silence: float) -> None:
        self.address, self._silence = address, silence
        self._greetings: queue.SimpleQueue[pb.ToMember | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[pb.FromMember | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[int, queue.SimpleQueue[pb.ToMember | None]] = {}
        self._numbers = itertools.count(1)
        self.broken: str | None = None
        self.left = False  # whether the leader's host left in good order
        self._heard = time.monotonic()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._reader = threading.Thread(target=self._read, name="allreduce-member", daemon=True)
        try:
            forks.hold(self)
            stub = leader_pb2_grpc.LeaderStub(self._channel)  # type: ignore[no-untyped-call]
            # A call that waits has the channel connect again until a connection takes it. Watching
            # the channel's states would miss some, and gRPC may look at a channel after its end.
            self._call = stub.Attend(self._requests(), wait_for_ready=True)
            self._reader.start()
        except BaseException:  # Ctrl-C, too: left open, it keeps the interpreter from ending
            self.abort()
            raise

    def send(self, message: pb.FromMember) -> None:
        """Send without awaiting an answer."""
        self._outbox.put(message)

    def greeting(self, patience: float) -> pb.ToMember:
        """Return the leader's next message of the handshake.

        Args:
            patience: Seconds to wait, also for a leader to connect to.

        Raises:
            ConnectionError: None has come, or the leader is gone.
        """
        try:
            message = self._greetings.get(timeout=patience)
        except queue.Empty:
            raise ConnectionError(unanswered(self.address, "leader")) from None
        if message is None:
            raise ConnectionError(self.broken)
        forks.hold(self)  # again: the name may not have resolved before
        return message

    def ask(self, message: pb.FromMember, timeout: float, margin: float) -> pb.ToMember:
        """Send and wait for the answer.

        Args:
            timeout: Seconds that the leader may delay the answer.
            margin: Seconds to wait beyond that.

        Raises:
            SilentError: It takes longer.
            ConnectionError: The leader is gone.
        """
        # Not a Future: an interrupt within its Condition.wait may surface as a RuntimeError.
        answer: queue.SimpleQueue[pb.ToMember | None] = queue.SimpleQueue()
        message.timeout = timeout
        with self._lock:
            if self.broken is not None:
                raise ConnectionError(self.broken)
            message.request = next(self._numbers)
            self._pending[message.request] = answer
        self._outbox.put(message)
        try:
            found = answer.get(timeout=timeout + margin)
        except queue.Empty:
            raise SilentError("it does not answer") from None
        finally:
            with self._lock:
                self._pending.pop(message.request, None)
        if found is None:
            raise ConnectionError(self.broken)
        return found

    def close(self) -> None:
        """Send Leave and close, so that the leader does not report a loss."""
        self.send(pb.FromMember(leave=pb.Leave()))
        self._outbox.put(None)
        self._reader.join(_GOODBYE_SECONDS)
        self.abort()

    def abort(self) -> None:
        """Close without Leave, as if the process had died."""
        self._outbox.put(None)
        self._channel.close()  # cancels the call
        forks.release(self)

    def _requests(self) -> Iterator[pb.FromMember]:
        wait: float | None = None  # no heartbeat before the first message
        while True:
            asked = time.monotonic()
            try:
                message = self._outbox.get(timeout=wait)
            except queue.Empty:
                message = pb.FromMember(beat=pb.Beat())
            wait = BEAT_SECONDS
            if message is None:
                return
            now = time.monotonic()
            if now - asked > 5 * BEAT_SECONDS:  # we were stopped or starved
                self._heard = now
            if now - self._heard > self._silence:
                self._break(f"it has been silent for {self._silence:g} s")
                self._call.cancel()
                return
            yield message

    def _read(self) -> None:
        reason = "it ended the connection"
        try:
            for message in self._call:
                self._heard = time.monotonic()
                self._dispatch(message)
            self.left = any(key == LEFT for key, _ in self._call.trailing_metadata())
        except grpc.RpcError:
            reason = self._call.details() or reason
        self._break(reason)

    def _dispatch(self, message: pb.ToMember) -> None:
        if message.request:
            with self._lock:
                answer = self._pending.pop(message.request, None)
            if answer is not None:
                answer.put(message)
        elif message.WhichOneof("content") != "beat":
            self._greetings.put(message)

    def _break(self, reason: str) -> None:
        with self._lock:
            self.broken = self.broken or reason
            pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer.put(None)
        self._greetings.put(None)
