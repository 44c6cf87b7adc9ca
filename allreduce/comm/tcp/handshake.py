"""How two members prove to each other, on a connection between them, that they belong to one job.

Four messages of fixed size: the caller's hello with a nonce; the listener's nonce and proof; the
caller's proof; the listener's welcome. A proof is HMAC-SHA256, keyed with the job's secret, over
the role, the job, the communicator's name, the hello and both nonces (`handshake.Meeting`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass

from allreduce.comm.handshake import HandshakeError, Meeting, receive

VERSION = 3
STRANGER_SECONDS = 2.0  # a connection that proves nothing within this time is dropped
_MAGIC = b"allreduce tcp le"  # the last two letters: numbers in frames are little-endian
_HELLO = struct.Struct("!16sI32sIIIIIII32s")
_NONCE = 32
_PROOF = 32
_WELCOME = b"welcome\n"
HELLO_BYTES = _HELLO.size
PROOF_BYTES = _PROOF


@dataclass(frozen=True)
class Hello:
    """Who calls whom, and for which of their connections."""

    generation: int
    size: int  # ranks of the world
    rank: int
    caller: int  # members of the communicator
    callee: int
    channel: int  # 0 for words, 1 for probes, others for data
    channels: int

    def pack(self, meeting: Meeting, nonce: bytes) -> bytes:
        return _HELLO.pack(
            *(_MAGIC, VERSION, _job(meeting), self.generation, self.size, self.rank),
            *(self.caller, self.callee, self.channel, self.channels, nonce),
        )


def _job(meeting: Meeting) -> bytes:
    return hashlib.sha256(meeting.job.encode()).digest()


def call(sock: socket.socket, meeting: Meeting, hello: Hello) -> None:
    """Prove ourselves to the listener, and have it prove itself.

    Raises:
        HandshakeError: The listener is not of this job, or refused us.
        OSError: The connection broke, or the listener did not answer in time.
    """
    packed = hello.pack(meeting, secrets.token_bytes(_NONCE))
    sock.sendall(packed)
    answer = receive(sock, _NONCE + _PROOF)
    nonce, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, meeting.proof(b"tcp listener", packed, nonce)):
        raise HandshakeError("it does not know the job's secret")
    sock.sendall(meeting.proof(b"tcp caller", packed, nonce))
    if receive(sock, len(_WELCOME)) != _WELCOME:
        raise HandshakeError("it does not speak this protocol")


class Challenge:
    """The listener's side of one handshake: bytes in, bytes out, no socket and no clock."""

    def __init__(self, meeting: Meeting, generation: int, size: int) -> None:
        self._meeting = meeting
        self._world = (generation, size)
        self._nonce = secrets.token_bytes(_NONCE)
        self._packed = b""
        self._hello: Hello | None = None

    @property
    def begun(self) -> bool:
        """Whether the caller has said who it is; it may have lied."""
        return bool(self._packed)

    @property
    def expects(self) -> int:
        """How many bytes the caller's next message has."""
        return _PROOF if self._packed else HELLO_BYTES

    def answer(self, message: bytes) -> tuple[bytes, Hello | None]:
        """Return what to send to the caller, and who it is once it has proved that.

        Raises:
            HandshakeError: It is a stranger, or of another world.
        """
        if not self._packed:
            self._hello = self._read(message)
            self._packed = message
            proof = self._meeting.proof(b"tcp listener", message, self._nonce)
            return self._nonce + proof, None
        expected = self._meeting.proof(b"tcp caller", self._packed, self._nonce)
        if not hmac.compare_digest(message, expected):
            raise HandshakeError("it does not know the job's secret")
        return _WELCOME, self._hello

    def _read(self, message: bytes) -> Hello:
        magic, version, job, *numbers, _ = _HELLO.unpack(message)
        if magic != _MAGIC:
            raise HandshakeError("it does not speak this protocol")
        if version != VERSION:
            raise HandshakeError(f"it speaks version {version} of this protocol, not {VERSION}")
        hello = Hello(*numbers)
        if job != _job(self._meeting) or (hello.generation, hello.size) != self._world:
            raise HandshakeError(f"it is rank {hello.rank} of another world")
        return hello
