"""A task of a cluster as a server: gRPC for registering graphs, data connections for steps."""

from __future__ import annotations

import atexit
import contextlib
import logging
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from allreduce import settings
from allreduce.cluster.host import machine
from allreduce.cluster.host.address import is_loopback, joined, split
from allreduce.cluster.leader.proof import NONCE_BYTES, digest, proves
from allreduce.cluster.leader.rpc import grpc
from allreduce.cluster.spec import ClusterSpec, own_task, parse_task
from allreduce.devices.names import DeviceName
from allreduce.devices.options import start_logging
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    JoinError,
    PeerLostError,
    TimeoutError,
    UnsupportedError,
    UsageError,
)
from allreduce.events import logger
from allreduce.graph.partition.tasks import task_name
from allreduce.server import task_pb2 as pb
from allreduce.server import task_pb2_grpc
from allreduce.server.channel import DEAD_SECONDS, Channel, accept
from allreduce.server.connect import OPTIONS, PROTOCOL, Peer, prove_call
from allreduce.server.encode import decode, encode
from allreduce.server.master import named_tasks, plan
from allreduce.server.mpi_messages import MpiMessages
from allreduce.server.worker import Worker

_THREADS = 16  # for registering; steps have the threads of their connection
_MOST_NONCES = 10_000
_LOOK = 0.5  # seconds, between looks whether a task is up, or has ended
_HANDSHAKES = 64  # strangers and others that may be connecting at the same time


class Server:
    """Serves one task of a cluster until `close()`.

    Args:
        cluster: The cluster, in any form that `ClusterSpec` accepts; by default as the environment
            describes it (`ALLREDUCE_CLUSTER`, or `TF_CONFIG`).
        job_name: This task's job.
        task_index: This task's number in its job.
        secret: What clients and other tasks must know; by default `ALLREDUCE_SECRET`. Without one,
            only loopback addresses are served.

    Attributes:
        target: The target for `Session`: "grpc://host:port".

    Raises:
        UsageError: There is no such task, or an address that others reach is without a secret.
        JoinError: Nothing can listen at the task's address.
    """

    def __init__(
        self,
        cluster: Any = None,
        job_name: str | None = None,
        task_index: int | None = None,
        *,
        secret: str | bytes | None = None,
    ) -> None:
        start_logging()
        self.cluster, job, number = _own(cluster, job_name, task_index)
        self.task = DeviceName(job=job, replica=0, task=number)
        self.name = task_name(self.task)
        address = self.cluster.address(job, number)
        self.target = f"grpc://{address}"
        found = settings.load().secret if secret is None else secret
        self._secret = found.encode() if isinstance(found, str) else found or b""
        _check_secret(address, self._secret)
        self.generation = secrets.randbits(63)
        self._mpi = MpiMessages() if settings.load().transport == "mpi" else None
        self.worker = Worker(self.task, self._channel_of)
        self._peers: dict[str, Peer] = {}
        self._channels: dict[str, tuple[Channel, int]] = {}  # by task, with its generation
        self._inbound: set[Channel] = set()
        self._connecting = threading.RLock()
        self._opening: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by task
        self._nonces: dict[bytes, bool] = {}  # and whether a data connection has used it
        self._lost: set[str] = set()  # tasks without a connection, which had one
        self._left: set[str] = set()  # those of them that have closed it in good order
        self._handles = 0
        self._closed = threading.Event()
        self._listener = _listen(split(address)[0])
        self._local_name = f"allreduce-{secrets.token_hex(16)}"
        self._local = socket.socket(socket.AF_UNIX)
        self._local.bind(f"\0{self._local_name}")
        self._local.listen(128)
        self._grpc = self._serve(address)
        self._handshakes = threading.Semaphore(_HANDSHAKES)
        for listener in (self._listener, self._local):
            threading.Thread(
                target=self._accept, args=(listener,), name="allreduce-server", daemon=True
            ).start()
        atexit.register(self._exit)
        logger.info("[server] %s serves at %s", self.name, address)

    def join(self, task: str | None = None) -> None:
        """Block until `close()` is called, or until another task has ended.

        Args:
            task: The other task, such as "worker:0"; None to wait for `close()` only. The task has
                ended when it has closed its server or exited without an exception. If it is not up
                yet, or is lost otherwise, this waits for it until the timeout
                (`ALLREDUCE_TIMEOUT`).

        Raises:
            TimeoutError: The task has not come up, or not come back, in time.
        """
        if task is None:
            while not self._closed.wait(_LOOK):  # so that Ctrl-C is noticed
                pass
            return
        job, number = parse_task(task)
        self.cluster.address(job, number)
        other = DeviceName(job=job, replica=0, task=number)
        while (channel := self._await_task(other)) is not None and not channel.has_left:
            while not (channel.ended or self._closed.wait(_LOOK)):
                pass

    def _await_task(self, task: DeviceName) -> Channel | None:
        """Connect to a task once it is up; None if it has ended, or this one has been closed."""
        timeout, name = settings.load().timeout, task_name(task)
        deadline = time.monotonic() + timeout
        while not self._closed.is_set() and name not in self._left:
            try:
                return self._connected(task, _LOOK)[0]
            except PeerLostError as error:
                if time.monotonic() > deadline:
                    what = "come back" if name in self._lost else "come up"
                    raise TimeoutError(
                        f"[server] {name} has not {what} within {timeout:g} s; start it again, or "
                        f"end this task ({error})"
                    ) from error
            self._closed.wait(_LOOK / 10)
        return None

    def close(self) -> None:
        """Stop serving; other tasks and clients see that this task has left."""
        atexit.unregister(self._exit)
        self._stop()

    def _exit(self) -> None:
        """End with the process: in good order, if no exception has ended it."""
        self._stop(in_order=getattr(sys, "last_value", None) is None)

    def _stop(self, *, in_order: bool = True) -> None:
        self._closed.set()
        self._grpc.stop(None)
        for listener in (self._listener, self._local):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._connecting:
            channels = [each for each, _ in self._channels.values()] + [*self._inbound]
            peers = list(self._peers.values())
        # Without the lock, which steps that end now may need.
        for channel in channels:
            if in_order:
                channel.leave()
            else:
                channel.end("this task has failed")
        for peer in peers:
            peer.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        atexit.unregister(self._exit)
        self._stop(in_order=kind is None)

    # --- gRPC ---

    def _serve(self, address: str) -> Any:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="allreduce-grpc")
        made = grpc.server(pool, options=[*OPTIONS, ("grpc.so_reuseport", 0)])
        task_pb2_grpc.add_TaskServicer_to_server(_Service(self), made)  # type: ignore[no-untyped-call]
        try:
            bound = made.add_insecure_port(address)
        except RuntimeError:
            bound = 0
        if not bound:
            self._listener.close()
            self._local.close()
            raise JoinError(
                f"[server] {self.name} cannot listen at {address}: another process does, or the "
                "address is not this host's"
            )
        made.start()
        return made

    def greet(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Answer a handshake."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = request.nonce + nonce
        self._nonces[nonces] = False
        while len(self._nonces) > _MOST_NONCES:
            self._nonces.pop(next(iter(self._nonces)))
        assert self.task.job is not None
        assert self.task.task is not None
        return pb.HelloReply(
            nonce=nonce,
            proof=digest(self._secret, b"server", nonces),
            cluster=self.cluster.as_json(),
            job=self.task.job,
            task=self.task.task,
            generation=self.generation,
            data_port=self._listener.getsockname()[1],
            devices=[str(each) for each in self.worker.devices],
            machine=machine.identity(),
            local_name=self._local_name,
            mpi_job="" if self._mpi is None else self._mpi.job,
            mpi_rank=0 if self._mpi is None else self._mpi.rank,
        )

    def knows(self, method: str, request: Any) -> bool:
        """Check the proof in a call, which is moved out of the request."""
        caller = pb.Caller()
        caller.CopyFrom(request.caller)
        request.ClearField("caller")
        expected = prove_call(self._secret, caller.nonces, method, request)
        return caller.nonces in self._nonces and proves(caller.proof, expected)

    def register_graph(self, request: pb.RegisterGraphRequest) -> pb.RegisterGraphReply:
        """Place and split a client's graph, and register the parts with their tasks."""
        deadline = time.monotonic() + request.timeout
        graph = decode(request.graph)
        wanted = [each for each in named_tasks(graph) if each != self.task and self._has(each)]
        peers = self._await_peers(wanted, request.timeout)
        devices = {self.task: self.worker.devices}
        for task, peer in peers.items():
            devices[task] = [DeviceName.parse(each) for each in peer.hello.devices]
        parts = plan(graph, self.cluster, self.worker.devices[0], devices)
        others = [task for task in parts if task != self.task and task not in peers]
        peers.update(self._await_peers(others, max(deadline - time.monotonic(), DEAD_SECONDS)))
        generations = {self.name: self.generation}
        for task in parts:
            if task != self.task:
                generations[task_name(task)] = peers[task].hello.generation
        self._handles += 1
        # With the generation, so that a restarted master reuses no handle.
        handle = (
            f"{request.client}/{self.task.job}.{self.task.task}.{self.generation:x}.{self._handles}"
        )
        messages = {
            task: pb.RegisterPartRequest(
                handle=handle, part=encode(part.graph), generations=generations
            )
            for task, part in parts.items()
        }
        answers = self._register_parts(messages, peers, request.timeout)
        failed = [each for each in answers.values() if each.error]
        if failed:
            self._release(handle, [task for task, each in answers.items() if not each.error])
            return pb.RegisterGraphReply(error=failed[0].error, kind=failed[0].kind)
        reply = pb.RegisterGraphReply(handle=handle)
        for task, part in parts.items():
            reply.parts.append(
                pb.PartOf(
                    task=task_name(task),
                    address=self._address(task),
                    feeds=part.feeds,
                    fetches=part.fetches,
                    missing=answers[task].missing,
                )
            )
        return reply

    def _has(self, task: DeviceName) -> bool:
        return any((job, number) == (task.job, task.task) for job, number, _ in self.cluster)

    def _address(self, task: DeviceName) -> str:
        assert task.job is not None
        assert task.task is not None
        return self.cluster.address(task.job, task.task)

    def _register_parts(
        self,
        messages: Mapping[DeviceName, pb.RegisterPartRequest],
        peers: Mapping[DeviceName, Peer],
        timeout: float,
    ) -> dict[DeviceName, pb.RegisterPartReply]:
        """Register the parts of a graph on all tasks at once, and connect to these tasks."""

        def register(task: DeviceName) -> pb.RegisterPartReply:
            message = messages[task]
            if task == self.task:
                return self.register_part(message)
            try:
                reply: pb.RegisterPartReply = peers[task].call("RegisterPart", message, timeout)
                if not reply.error:  # a task is told by the connection when this one ends
                    self._channel_of(task, message.generations[task_name(task)])
            except AllreduceError as error:
                return pb.RegisterPartReply(error=_text(error), kind=type(error).__name__)
            return reply

        with ThreadPoolExecutor(max(len(messages), 1)) as pool:
            return dict(zip(messages, pool.map(register, messages), strict=True))

    def _release(self, handle: str, tasks: Sequence[DeviceName]) -> None:
        """Forget the parts of a graph that could not be registered on all tasks."""
        for task in tasks:
            if task == self.task:
                self.worker.release([handle])
                continue
            with contextlib.suppress(PeerLostError):  # its parts are gone with it
                channel, _ = self._connected(task)
                channel.send(pb.Frame(kind=pb.Frame.RELEASE, handle=handle))

    def register_part(self, request: pb.RegisterPartRequest) -> pb.RegisterPartReply:
        """Compile this task's part of a graph; an error is in the reply."""
        try:
            return pb.RegisterPartReply(missing=self.worker.register(request))
        except Exception as error:  # reaches the client, by the master
            return pb.RegisterPartReply(
                error=f"{self.name}: {_text(error)}", kind=type(error).__name__
            )

    # --- other tasks ---

    def _await_peers(self, tasks: Sequence[DeviceName], timeout: float) -> dict[DeviceName, Peer]:
        """Greet other tasks, all at once.

        Raises:
            TimeoutError: Some do not answer in time; names all of them.
        """
        if not tasks:
            return {}

        def greet(task: DeviceName) -> Peer | None:
            try:
                return self._peer(task, timeout)
            except TimeoutError:
                return None

        with ThreadPoolExecutor(len(tasks)) as pool:
            found = dict(zip(tasks, pool.map(greet, tasks), strict=True))
        missing = [f"{task_name(t)} at {self._address(t)}" for t, p in found.items() if p is None]
        if missing:
            raise TimeoutError(
                f"[server] no answer from {', '.join(missing)} within {timeout:g} s; start what is "
                "missing, or check the cluster's addresses"
            )
        return {task: peer for task, peer in found.items() if peer is not None}

    def _peer(self, task: DeviceName, timeout: float) -> Peer:
        """Greet another task, which may have restarted meanwhile."""
        address = self._address(task)
        with self._connecting:
            peer = self._peers.get(address)
        if peer is None:
            peer = Peer(address, self._secret, timeout, task_name(task), self._closed)
            with self._connecting:
                self._peers[address] = peer
        else:
            peer.greet(timeout)
        if (peer.hello.job, peer.hello.task) != (task.job, task.task):
            raise JoinError(
                f"[server] the process at {address} is {peer.name}, but the cluster of "
                f"{self.name} has {task_name(task)} there; give all tasks the same cluster"
            )
        return peer

    def _channel_of(self, task: DeviceName, generation: int) -> Channel:
        """Return the data connection to a task of a generation."""
        channel, found = self._connected(task)
        if found != generation:
            raise PeerLostError(
                f"[server] {task_name(task)} has restarted since the graph was registered"
            )
        return channel

    def _connected(self, task: DeviceName, timeout: float = DEAD_SECONDS) -> tuple[Channel, int]:
        """Return the data connection to a task, and the task's generation.

        Raises:
            PeerLostError: It cannot be reached.
        """
        name = task_name(task)
        known = self._channels.get(name)
        if known is None:
            with self._opening[name]:
                known = self._channels.get(name) or self._open(task, timeout)
        return known

    def _open(self, task: DeviceName, timeout: float) -> tuple[Channel, int]:
        name = task_name(task)
        try:
            peer = self._peer(task, timeout)
            channel = peer.open(self.name, self._handle, self._lose, mpi=self._mpi)
        except (ClosedError, JoinError, TimeoutError) as error:
            raise PeerLostError(f"[server] {name} is lost: {error}") from error
        with self._connecting:
            if not (channel.ended or self._closed.is_set()):
                self._channels[name] = channel, peer.hello.generation
                self._find(name)
                return self._channels[name]
        channel.leave()
        raise PeerLostError(f"[server] {name} is lost: {channel.ended}")

    def _find(self, name: str) -> None:
        """Note that a task lives."""
        if name in self._lost:
            logger.info("[server] %s: %s is back", self.name, name)
        self._lost.discard(name)
        self._left.discard(name)

    def _lose(self, channel: Channel, why: str) -> None:
        """Note the end of a data connection, in either direction."""
        name = channel.peer
        with self._connecting:
            self._inbound.discard(channel)
            known = self._channels.get(name)
            if known is not None and known[0] is channel:
                del self._channels[name]
            if name.startswith("/job:") and not self._closed.is_set():
                if channel.has_left:
                    self._left.add(name)
                if name not in self._lost:
                    level = logging.INFO if channel.has_left else logging.WARNING
                    logger.log(level, "[server] %s has lost %s: %s", self.name, name, why)
                self._lost.add(name)
        self.worker.lose(name, why)

    def tasks(self) -> dict[str, bool]:
        """Ask all tasks of the cluster whether they live."""
        pool = ThreadPoolExecutor(_THREADS)
        tasks = [DeviceName(job=job, replica=0, task=number) for job, number, _ in self.cluster]
        with pool:
            living = list(pool.map(self._lives, tasks))
        return {task_name(task): lives for task, lives in zip(tasks, living, strict=True)}

    def _lives(self, task: DeviceName) -> bool:
        if task == self.task:
            return True
        try:
            self._peer(task, DEAD_SECONDS)
        except (ClosedError, JoinError, TimeoutError):
            return False
        return True

    # --- data connections ---

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            peer = accept(connection, self._secret, self._take_nonces)
        except (OSError, ValueError) as error:
            logger.debug("[server] %s refuses a connection: %s", self.name, error)
            connection.close()
            return
        finally:
            self._handshakes.release()
        with self._connecting:
            if self._closed.is_set():
                connection.close()
                return
            channel = Channel(connection, peer, self._handle, self._lose, mpi=self._mpi)
            if not channel.ended:
                self._inbound.add(channel)
                self._find(peer)

    def _take_nonces(self, nonces: bytes) -> bool:
        """Return whether a handshake made these nonces, for the first data connection only."""
        if self._nonces.get(nonces, True):
            return False
        self._nonces[nonces] = True
        return True

    def _handle(self, channel: Channel, frame: pb.Frame, arrays: Sequence[np.ndarray]) -> None:
        kind = frame.kind
        if kind == pb.Frame.TENSOR:
            self.worker.deliver(frame, arrays[0])
        elif kind == pb.Frame.ABORT:
            self.worker.abort(frame.handle, frame.step, PeerLostError(frame.error))
        elif kind == pb.Frame.RELEASE:
            self.worker.release([frame.handle])
        elif kind in _ANSWERS:
            self._answer(channel, frame, arrays)

    def _answer(self, channel: Channel, frame: pb.Frame, arrays: Sequence[np.ndarray]) -> None:
        reply = pb.Frame(kind=pb.Frame.DONE, request=frame.request)
        results: Sequence[np.ndarray] = ()
        try:
            results = _ANSWERS[frame.kind](self, frame, arrays, reply)
        except Exception as error:  # reaches the client, which raises it
            reply = failure(error, frame.request)
        with contextlib.suppress(PeerLostError):  # the client is gone
            try:
                channel.send(reply, results)
            except UnsupportedError as error:
                channel.send(failure(error, frame.request))

    def _run(
        self, frame: pb.Frame, arrays: Sequence[np.ndarray], _: pb.Frame
    ) -> Sequence[np.ndarray]:
        return [np.asarray(each) for each in self.worker.run(frame, arrays)]

    def _read(self, frame: pb.Frame, _: Sequence[np.ndarray], __: pb.Frame) -> Sequence[np.ndarray]:
        return self.worker.read(frame.names)

    def _assign(
        self, frame: pb.Frame, arrays: Sequence[np.ndarray], _: pb.Frame
    ) -> Sequence[np.ndarray]:
        self.worker.assign(frame.names, arrays, frame.if_missing)
        return ()

    def _list(self, _: pb.Frame, __: Sequence[np.ndarray], reply: pb.Frame) -> Sequence[np.ndarray]:
        reply.names.extend(f"{task}={lives:d}" for task, lives in self.tasks().items())
        return ()


_ANSWERS: Mapping[int, Any] = {
    pb.Frame.RUN: Server._run,
    pb.Frame.READ: Server._read,
    pb.Frame.ASSIGN: Server._assign,
    pb.Frame.TASKS: Server._list,
}


class _Service(task_pb2_grpc.TaskServicer):
    """The gRPC methods of a server; errors travel in the reply."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:  # noqa: N802
        if request.protocol != PROTOCOL or len(request.nonce) != NONCE_BYTES:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this task speaks protocol {PROTOCOL}, not {request.protocol}; install the same "
                "version of allreduce on all hosts",
            )
        return self._server.greet(request)

    def RegisterGraph(  # noqa: N802
        self, request: pb.RegisterGraphRequest, context: Any
    ) -> pb.RegisterGraphReply:
        self._check("RegisterGraph", request, context)
        try:
            return self._server.register_graph(request)
        except Exception as error:  # reaches the client, which raises it
            return pb.RegisterGraphReply(error=_text(error), kind=type(error).__name__)

    def RegisterPart(  # noqa: N802
        self, request: pb.RegisterPartRequest, context: Any
    ) -> pb.RegisterPartReply:
        self._check("RegisterPart", request, context)
        return self._server.register_part(request)

    def _check(self, method: str, request: Any, context: Any) -> None:
        if not self._server.knows(method, request):
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the call has no proof of the secret for a handshake that this task has made",
            )


def failure(error: Exception, request: int) -> pb.Frame:
    """Describe an error for the client."""
    shown = "".join(traceback.format_exception(error))
    reply = pb.Frame(kind=pb.Frame.FAILED, request=request, error=_text(error))
    reply.error_kind = type(error).__name__
    reply.names.append(shown)
    return reply


def _text(error: Exception) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _own(cluster: Any, job: str | None, number: int | None) -> tuple[ClusterSpec, str, int]:
    """Return the cluster and task of a server; what is not given comes from the environment."""
    found = own_task() if cluster is None or job is None else None
    if cluster is None and found is None:
        raise UsageError(
            "[server] no cluster is given; pass one to Server(cluster, job_name, task_index), or "
            "set ALLREDUCE_CLUSTER and ALLREDUCE_TASK"
        )
    spec = found[0] if cluster is None and found is not None else ClusterSpec(cluster)
    if job is None:
        if found is None:
            raise UsageError("[server] job_name is not given; which task of the cluster is this?")
        job, number = found[1], found[2] if number is None else number
    number = 0 if number is None else number
    spec.address(job, number)
    return spec, job, number


def _check_secret(address: str, secret: bytes) -> None:
    if not secret and not is_loopback(split(address)[0]):
        raise UsageError(
            f"[server] {address} is not a loopback address, and there is no secret: anybody on "
            "the network could run programs here; set ALLREDUCE_SECRET to the same random text "
            "on all tasks and clients"
        )


def _listen(host: str) -> socket.socket:
    """Listen for data connections at a free port of a host's address."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, proto)
    try:
        made.bind(address)
        made.listen(128)
    except OSError as error:
        made.close()
        raise JoinError(
            f"[server] cannot listen at {joined(host, 0)}: {error.strerror}; is the address in the "
            "cluster this host's?"
        ) from error
    return made
