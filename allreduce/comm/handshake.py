"""How two processes of one host prove to each other that they belong to the same job.

Three messages of fixed size: the caller's hello with a nonce; the listener's nonce and proof;
the caller's proof. A proof is HMAC-SHA256, keyed with the job's secret, over the role, the job, the
name of the meeting, the hello and both nonces. The kernel vouches that both run as the same user.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

_MAGIC = b"allreduce comm 2"
_HELLO = struct.Struct("!16sIIIIIQ16s16s")
_NONCE = 16
_PROOF = 32
_CREDENTIALS = struct.Struct("3i")


class HandshakeError(Exception):
    """The other side is not who it should be; the text says why."""


class Token(NamedTuple):
    """Random bytes that a process has in its memory: who finds them there can read that memory."""

    address: int
    value: bytes


NO_TOKEN = Token(0, bytes(16))


class Hello(NamedTuple):
    """What a process says of itself."""

    generation: int
    size: int
    rank: int
    pid: int
    local_members: int
    token: Token = NO_TOKEN

    def pack(self, nonce: bytes) -> bytes:
        numbers = (self.generation, self.size, self.rank, self.pid, self.local_members)
        return _HELLO.pack(_MAGIC, *numbers, *self.token, nonce)


@dataclass(eq=False, repr=False)  # it has a secret
class Meeting:
    """What both sides know beforehand."""

    job: str
    name: str
    secret: bytes

    def proof(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        """Return the proof that `role` knows the secret."""
        text = b"\0".join((role, self.job.encode(), self.name.encode(), hello, nonce))
        return hmac.digest(self.secret, text, "sha256")


def receive(sock: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        HandshakeError: The other side closed the connection.
        OSError: It did not answer within the socket's timeout, or the connection broke.
    """
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise HandshakeError("it closed the connection")
        data += part
    return data


def _check_user(sock: socket.socket) -> None:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise HandshakeError(f"it runs as user {uid}, not {os.getuid()}")


def call(sock: socket.socket, meeting: Meeting, hello: Hello) -> None:
    """Prove ourselves to the listener, and have it prove itself.

    Raises:
        HandshakeError: The listener is not of this job, or refused us.
    """
    _check_user(sock)
    packed = hello.pack(secrets.token_bytes(_NONCE))
    sock.sendall(packed)
    answer = receive(sock, _NONCE + _PROOF)
    nonce, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, meeting.proof(b"listener", packed, nonce)):
        raise HandshakeError("it does not know the job's secret")
    sock.sendall(meeting.proof(b"caller", packed, nonce))


def answer(sock: socket.socket, meeting: Meeting, generation: int, size: int) -> Hello:
    """Have a caller prove itself, and prove ourselves to it.

    Raises:
        HandshakeError: The caller is a stranger, or of another generation or world.
    """
    _check_user(sock)
    packed = receive(sock, _HELLO.size)
    magic, *numbers, address, value, _ = _HELLO.unpack(packed)
    if magic != _MAGIC:
        raise HandshakeError("it does not speak this protocol")
    hello = Hello(*numbers)._replace(token=Token(address, value))
    nonce = secrets.token_bytes(_NONCE)
    sock.sendall(nonce + meeting.proof(b"listener", packed, nonce))
    proof = receive(sock, _PROOF)
    if not hmac.compare_digest(proof, meeting.proof(b"caller", packed, nonce)):
        raise HandshakeError("it does not know the job's secret")
    if (hello.generation, hello.size) != (generation, size) or not 0 < hello.rank < size:
        raise HandshakeError(f"it is rank {hello.rank} of another world")
    return hello
