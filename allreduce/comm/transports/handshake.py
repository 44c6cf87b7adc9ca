"""Mutual authentication of two processes of one job on a new connection.

Four messages of fixed size: the caller's hello with a nonce; the listener's nonce and proof; the
caller's proof; the listener's welcome. A proof covers the role, the job, the name of the meeting,
the hello and both nonces (`cluster.leader.proof`). On a Unix socket the kernel also certifies that
both processes run as the same user.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from allreduce.cluster.leader.proof import NONCE_BYTES, PROOF_BYTES, digest, nonce, proves

VERSION = 4
# Unauthenticated connections are dropped after this time. On a busy machine, a member may need some
# seconds to authenticate, and without its connection the job fails.
STRANGER_SECONDS = 10.0
_HEAD = struct.Struct("!16sI")
_MAGIC = b"allreduce job le"  # the last two letters: numbers in frames are little-endian
_WELCOME = b"welcome\n"
_CREDENTIALS = struct.Struct("3i")
_STRANGER = "it does not speak this protocol"


class HandshakeError(Exception):
    """The peer failed authentication; the text says why."""


@dataclass(eq=False, repr=False)  # it has a secret
class Credentials:
    """The secret and the names that both sides know beforehand."""

    job: str
    name: str  # new in the job
    secret: bytes

    def proof(self, role: str, hello: bytes, nonce: bytes) -> bytes:
        """Return the proof for `role`, "caller" or "listener"."""
        texts = (role, self.job, self.name)
        return digest(self.secret, *(text.encode() for text in texts), hello, nonce)

    def check(self, proof: bytes, role: str, hello: bytes, nonce: bytes) -> None:
        """Raise HandshakeError if the proof of `role` is wrong."""
        if not proves(proof, self.proof(role, hello, nonce)):
            raise HandshakeError("it does not know the job's secret")


def receive(sock: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        HandshakeError: The peer closed the connection.
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
    if sock.family != socket.AF_UNIX:
        return
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise HandshakeError(f"it runs as user {uid}, not {os.getuid()}")


def call(sock: socket.socket, credentials: Credentials, claim: bytes) -> None:
    """Run the caller's side of the handshake.

    Args:
        sock: The connection, with a timeout.
        claim: The caller's identity, which the proof covers.

    Raises:
        HandshakeError: The listener does not belong to this job, or refused.
        OSError: The connection broke, or the listener did not answer in time.
    """
    _check_user(sock)
    hello = _HEAD.pack(_MAGIC, VERSION) + nonce() + claim
    sock.sendall(hello)
    answer = receive(sock, NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    credentials.check(proof, "listener", hello, theirs)
    sock.sendall(credentials.proof("caller", hello, theirs))
    if receive(sock, len(_WELCOME)) != _WELCOME:
        raise HandshakeError(_STRANGER)


class Challenge:
    """The listener's side of one handshake, without I/O.

    Args:
        size: The size of the caller's claim in bytes.
    """

    def __init__(self, credentials: Credentials, size: int) -> None:
        self._credentials, self._size = credentials, size
        self._nonce, self._hello = nonce(), b""

    @property
    def begun(self) -> bool:
        """Whether the hello has arrived."""
        return bool(self._hello)

    @property
    def expects(self) -> int:
        """The size of the caller's next message in bytes."""
        return PROOF_BYTES if self._hello else _HEAD.size + NONCE_BYTES + self._size

    def answer(self, message: bytes) -> tuple[bytes, bytes | None]:
        """Return the reply, and the claim once the caller has proved it.

        Raises:
            HandshakeError: The caller failed, or has another version.
        """
        if self._hello:
            self._credentials.check(message, "caller", self._hello, self._nonce)
            return _WELCOME, self._hello[-self._size :]
        magic, version = _HEAD.unpack_from(message)
        if magic != _MAGIC:
            raise HandshakeError(_STRANGER)
        if version != VERSION:
            raise HandshakeError(f"it speaks version {version} of this protocol, not {VERSION}")
        self._hello = message
        return self._nonce + self._credentials.proof("listener", message, self._nonce), None


def answer(sock: socket.socket, credentials: Credentials, size: int) -> bytes:
    """Run the listener's side of the handshake; return the caller's claim of `size` bytes.

    Raises:
        HandshakeError: The caller failed.
    """
    _check_user(sock)
    challenge, claim = Challenge(credentials, size), None
    while claim is None:
        reply, claim = challenge.answer(receive(sock, challenge.expects))
        sock.sendall(reply)
    return claim
