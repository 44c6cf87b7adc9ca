"""The handshake of a data connection: the caller proves to know the secret of the gRPC one."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

from allreduce.cluster.leader.proof import NONCE_BYTES
from allreduce.comm.transports import handshake

HANDSHAKE_SECONDS = 5.0

_CLAIM = struct.Struct(f"{2 * NONCE_BYTES}s256p")  # the nonces and the name of the caller


def connect(
    address: tuple[str, int] | str, secret: bytes, nonces: bytes, identity: str
) -> socket.socket:
    """Open a data connection, and prove to know the secret.

    Args:
        address: Host and port of the other process, or the name of its Unix socket.
        secret: The cluster's secret.
        nonces: The two nonces of the gRPC handshake, joined.
        identity: This end's name, for the other's messages.

    Raises:
        OSError: Nothing listens there, or the other process refuses.
    """
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(HANDSHAKE_SECONDS)
    else:
        connection = socket.create_connection(address, HANDSHAKE_SECONDS)
    try:
        if isinstance(address, str):
            connection.connect(f"\0{address}")
        handshake.call(connection, _credentials(secret), _CLAIM.pack(nonces, identity.encode()))
    except handshake.HandshakeError as error:
        connection.close()
        raise ConnectionRefusedError(str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def accept(connection: socket.socket, secret: bytes, is_known: Callable[[bytes], bool]) -> str:
    """Check a new connection's proof; returns the other end's name.

    Args:
        connection: What `socket.accept` returned.
        secret: The cluster's secret.
        is_known: Returns whether the gRPC handshake made these nonces; once for each.

    Raises:
        OSError, ValueError: The other end did not prove to know the secret in time.
    """
    # One deadline for all of it: a stranger may send byte by byte.
    late = threading.Timer(HANDSHAKE_SECONDS, connection.shutdown, (socket.SHUT_RDWR,))
    late.daemon = True
    late.start()
    challenge, claim = handshake.Challenge(_credentials(secret), _CLAIM.size), None
    try:
        while claim is None:
            reply, claim = challenge.answer(handshake.receive(connection, challenge.expects))
            if claim is not None and not is_known(_CLAIM.unpack(claim)[0]):
                raise ValueError("its gRPC handshake was not made here, or has been used")
            connection.sendall(reply)
    except handshake.HandshakeError as error:
        raise ValueError(str(error)) from error
    finally:
        late.cancel()
    name: bytes = _CLAIM.unpack(claim)[1]
    return name.decode()


def _credentials(secret: bytes) -> handshake.Credentials:
    return handshake.Credentials("cluster", "data", secret)
