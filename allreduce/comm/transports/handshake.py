"""How two processes prove to each other, on a connection between them, that they belong to one job.

Four messages of fixed size: the caller's hello with a nonce; the listener's nonce and proof; the
caller's proof; the listener's welcome. A proof covers the role, the job, the name of the meeting,
the hello and both nonces (`cluster.proof`). On a Unix socket the kernel vouches that both processes
run as the same user, too.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from allreduce.cluster.leader.proof import NONCE_BYTES, PROOF_BYTES, digest, nonce, proves

VERSION = 4
STRANGER_SECONDS = 2.0  # a connection that proves nothing within this time is dropped
_HEAD = struct.Struct("!16sI")
_MAGIC = b"allreduce job le"  # the last two letters: numbers in frames are little-endian
_WELCOME = b"welcome\n"
_CREDENTIALS = struct.Struct("3i")
_STRANGER = "it does not speak this protocol"


class HandshakeError(Exception):
    """The other side is not who it should be; the text says why."""


@dataclass(eq=False, repr=False)  # it has a secret
class Credentials:
    """What both sides know beforehand."""

    job: str
    name: str  # new in the job
    secret: bytes

    def proof(self, role: str, hello: bytes, nonce: bytes) -> bytes:
        """Return the proof that `role`, "caller" or "listener", knows the secret."""
        texts = (role, self.job, self.name)
        return digest(self.secret, *(text.encode() for text in texts), hello, nonce)

    def check(self, proof: bytes, role: str, hello: bytes, nonce: bytes) -> None:
        """Raise HandshakeError if `role` has not proved that it knows the secret."""
        if not proves(proof, self.proof(role, hello, nonce)):
            raise HandshakeError("it does not know the job's secret")


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
    if sock.family != socket.AF_UNIX:
        return
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise HandshakeError(f"it runs as user {uid}, not {os.getuid()}")


def call(sock: socket.socket, meeting: Credentials, claim: bytes) -> None:
    """Prove ourselves to the listener, and have it prove itself.

    Args:
        sock: Its calls end in time.
        meeting: What both sides know.
        claim: What we say of ourselves.

    Raises:
        HandshakeError: The listener is not of this job, or refused us.
        OSError: The connection broke, or the listener did not answer in time.
    """
    _check_user(sock)
    hello = _HEAD.pack(_MAGIC, VERSION) + nonce() + claim
    sock.sendall(hello)
    answer = receive(sock, NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    meeting.check(proof, "listener", hello, theirs)
    sock.sendall(meeting.proof("caller", hello, theirs))
    if receive(sock, len(_WELCOME)) != _WELCOME:
        raise HandshakeError(_STRANGER)


class Challenge:
    """The listener's side of one handshake: bytes in, bytes out, no socket and no clock.

    Args:
        meeting: What both sides know.
        size: Bytes of the caller's claim.
    """

    def __init__(self, meeting: Credentials, size: int) -> None:
        self._meeting, self._size = meeting, size
        self._nonce, self._hello = nonce(), b""

    @property
    def begun(self) -> bool:
        """Whether the caller has said who it is; it may have lied."""
        return bool(self._hello)

    @property
    def expects(self) -> int:
        """How many bytes the caller's next message has."""
        return PROOF_BYTES if self._hello else _HEAD.size + NONCE_BYTES + self._size

    def answer(self, message: bytes) -> tuple[bytes, bytes | None]:
        """Return what to send to the caller, and its claim once it has proved that.

        Raises:
            HandshakeError: It is a stranger, or of another version.
        """
        if self._hello:
            self._meeting.check(message, "caller", self._hello, self._nonce)
            return _WELCOME, self._hello[-self._size :]
        magic, version = _HEAD.unpack_from(message)
        if magic != _MAGIC:
            raise HandshakeError(_STRANGER)
        if version != VERSION:
            raise HandshakeError(f"it speaks version {version} of this protocol, not {VERSION}")
        self._hello = message
        return self._nonce + self._meeting.proof("listener", message, self._nonce), None


def answer(sock: socket.socket, meeting: Credentials, size: int) -> bytes:
    """Have a caller prove itself, and prove ourselves to it; returns its claim of `size` bytes.

    Raises:
        HandshakeError: The caller is a stranger.
    """
    _check_user(sock)
    challenge, claim = Challenge(meeting, size), None
    while claim is None:
        reply, claim = challenge.answer(receive(sock, challenge.expects))
        sock.sendall(reply)
    return claim
