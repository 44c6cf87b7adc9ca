"""Connect to the task at an address: the gRPC handshake, calls, and the data connection."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from allreduce import settings
from allreduce.cluster.host import machine
from allreduce.cluster.host.address import split
from allreduce.cluster.host.waiting import Wait
from allreduce.cluster.leader.proof import NONCE_BYTES, digest, proves
from allreduce.cluster.leader.rpc import grpc
from allreduce.errors import ClosedError, JoinError, TimeoutError
from allreduce.events import logger
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol import task_pb2_grpc
from allreduce.server.protocol.channel import Channel, Handle
from allreduce.server.protocol.data_handshake import HANDSHAKE_SECONDS, connect
from allreduce.server.protocol.mpi_messages import MpiMessages

PROTOCOL = 5
MOST_MESSAGE_BYTES = (1 << 31) - 1  # constants travel inside of graphs
OPTIONS = [
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a task that comes up is noticed at once
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_RETRY_SECONDS = 0.1
# A task that has restarted does not know the handshake; its predecessor's connection has ended.
_RESTARTED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE)


def prove_call(secret: bytes, nonces: bytes, method: str, request: Any) -> bytes:
    """Compute the caller's proof for one call.

    Args:
        secret: The cluster's secret.
        nonces: The two nonces of the handshake, joined.
        method: The name of the gRPC method.
        request: The request, without `caller`.
    """
    content = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
    return digest(secret, b"caller", nonces, method.encode(), content)


class Peer:
    """A task as another process sees it.

    Args:
        address: `host:port` of the task's gRPC server.
        secret: The cluster's secret.
        timeout: Seconds to wait for the task to come up.
        name: The task's name, which is checked; "" if it is not known.
        closed: Ends all waiting when it is set; None if nothing does.

    Attributes:
        hello: The task's identity, cluster and devices.

    Raises:
        TimeoutError: Nothing answers at the address in time.
        JoinError: The task has another name, secret or version of this library, or the server there
            is no task.
        ClosedError: `closed` was set.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        timeout: float,
        name: str = "",
        closed: threading.Event | None = None,
    ) -> None:
        self.address = address
        self._secret, self._name = secret, name
        self._closed = threading.Event() if closed is None else closed
        self._grpc = grpc.insecure_channel(address, OPTIONS)
        self._stub: Any = task_pb2_grpc.TaskStub(self._grpc)  # type: ignore[no-untyped-call]
        self.hello: pb.HelloReply
        try:
            self.greet(timeout)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The task's name: "/job:ps/task:0"."""
        return f"/job:{self.hello.job}/task:{self.hello.task}"

    def greet(self, timeout: float) -> None:
        """Make the handshake, again if the task may have restarted; as the constructor does."""
        own = secrets.token_bytes(NONCE_BYTES)
        request = pb.HelloRequest(protocol=PROTOCOL, nonce=own)
        wait, name = Wait(timeout), self._name or "the task"
        while True:
            if self._closed.is_set():
                raise ClosedError(f"[server] closed while waiting for {self._name or self.address}")
            left = max(wait.remaining, _RETRY_SECONDS)
            try:
                reply = self._stub.Hello(request, timeout=min(left, HANDSHAKE_SECONDS))
                break
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise JoinError(f"[server] {self.address} refuses: {error.details()}") from None
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise JoinError(
                        f"[server] the gRPC server at {self.address} is no task of a cluster; "
                        "check the address"
                    ) from None
                if not wait.has_time_left(f"{name} at {self.address} to answer"):
                    who = f"{self._name} does not answer" if self._name else "no task answers"
                    raise TimeoutError(
                        f"[server] {who} at {self.address} within {timeout:g} s "
                        f"({error.details()}); start it, or check the cluster's addresses"
                    ) from None
            self._closed.wait(_RETRY_SECONDS)  # not above: Ctrl-C here has no error before it
        nonces = own + reply.nonce
        if not proves(reply.proof, digest(self._secret, b"server", nonces)):
            raise JoinError(
                f"[server] this process and {name} at {self.address} have "
                "different secrets; set ALLREDUCE_SECRET to the same text on all tasks and clients"
            )
        self._nonces = nonces
        self.hello = reply
        if self._name not in ("", self.name):
            raise JoinError(
                f"[server] the process at {self.address} is {self.name}, but this cluster has "
                f"{self._name} there; give all tasks the same cluster"
            )

    def call(self, method: str, request: Any, timeout: float) -> Any:
        """Call a method of the task's gRPC service, with a proof for this call.

        A task that has restarted, or has forgotten the handshake, is greeted once more.

        Raises:
            TimeoutError: The task does not answer in time.
            JoinError: The task refuses the proof.
        """
        deadline = time.monotonic() + timeout
        try:
            return self._call(method, request, timeout)
        except grpc.RpcError as error:
            if error.code() not in _RESTARTED:
                raise self._unanswered(method, error) from None
        self.greet(max(deadline - time.monotonic(), HANDSHAKE_SECONDS))
        try:
            return self._call(method, request, max(deadline - time.monotonic(), HANDSHAKE_SECONDS))
        except grpc.RpcError as error:
            raise self._unanswered(method, error) from None

    def _call(self, method: str, request: Any, timeout: float) -> Any:
        nonces = self._nonces
        request.ClearField("caller")
        proof = prove_call(self._secret, nonces, method, request)
        request.caller.nonces, request.caller.proof = nonces, proof
        return getattr(self._stub, method)(request, timeout=timeout)

    def _unanswered(self, method: str, error: Any) -> Exception:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return JoinError(
                f"[server] {self.name} at {self.address} refuses {method}: {error.details()}"
            )
        return TimeoutError(
            f"[server] {self.name} at {self.address} does not answer {method} "
            f"({error.code().name}: {error.details()})"
        )

    def open(
        self,
        identity: str,
        handle: Handle | None,
        lost: Callable[[Channel, str], None],
        *,
        mpi: MpiMessages | None = None,
    ) -> Channel:
        """Open the data connection; the arguments are those of `Channel`.

        Raises:
            JoinError: The task refuses it, or cannot be reached there.
        """
        host, _ = split(self.address)
        address = host, self.hello.data_port
        try:
            connection = self._connect_local(identity) or connect(
                address, self._secret, self._nonces, identity
            )
        except OSError as error:
            raise JoinError(
                f"[server] {self.name} does not accept a data connection at {host}:"
                f"{self.hello.data_port}: {error}"
            ) from error
        same_job = mpi is not None and mpi.job == self.hello.mpi_job
        rank = self.hello.mpi_rank if same_job else None
        if rank is not None:
            logger.info("[server] MPI carries large arrays to %s", self.name)
        return Channel(connection, self.name, handle, lost, mpi=mpi, mpi_rank=rank)

    def _connect_local(self, identity: str) -> socket.socket | None:
        """Connect to a task of this host by a Unix socket, which is faster; None if that fails."""
        if self.hello.machine != machine.identity():
            return None
        try:
            return connect(self.hello.local_name, self._secret, self._nonces, identity)
        except OSError:  # another network namespace
            return None

    def close(self) -> None:
        """End the gRPC connection."""
        with contextlib.suppress(Exception):
            self._grpc.close()


def secret_of(given: str | bytes | None) -> bytes:
    """Return the secret that is given, or else that of `ALLREDUCE_SECRET`; b"" for none."""
    if given is None:
        return settings.load().secret or b""
    found: bytes = b"" if given in ("", b"") else settings.check("SECRET", given)
    return found


def client_of(task: str, client: str) -> str:
    """Name a client of a task's program."""
    return f"{task}#{client}"


def task_of(name: str) -> str:
    """Return the task of whose program a connection's other end is a client, or the other end."""
    return name.partition("#")[0]
