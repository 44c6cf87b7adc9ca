"""The gRPC service of a task: handshakes, and the registration of graphs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from allreduce.cluster.host import machine
from allreduce.cluster.leader.proof import NONCE_BYTES, digest, proves
from allreduce.cluster.leader.rpc import grpc
from allreduce.cluster.process import traces
from allreduce.devices.names import DeviceName
from allreduce.errors import AllreduceError, InternalError, PeerLostError
from allreduce.graph.partition.tasks import task_name
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol import task_pb2_grpc
from allreduce.server.protocol.channel import DEAD_SECONDS
from allreduce.server.protocol.connect import PROTOCOL, Peer, prove_call
from allreduce.server.protocol.encode import decode, encode
from allreduce.server.protocol.frames import Frame
from allreduce.server.task.connections import Connections
from allreduce.server.task.master import named_tasks, plan
from allreduce.server.task.worker import Worker


class Service(task_pb2_grpc.TaskServicer):
    """The gRPC methods of a task; errors travel in the reply.

    Args:
        worker: The task's variables and parts of graphs.
        connections: Its connections to the other tasks.
        generation: The number of this run of the task.
        secret: The cluster's secret.
    """

    def __init__(
        self, worker: Worker, connections: Connections, generation: int, secret: bytes
    ) -> None:
        self._worker, self._connections, self._generation = worker, connections, generation
        self._task, self._name = connections.task, connections.name
        self._secret = secret
        self._handles = 0

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:  # noqa: N802
        if request.protocol != PROTOCOL or len(request.nonce) != NONCE_BYTES:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this task speaks protocol {PROTOCOL}, not {request.protocol}; install the same "
                "version of allreduce on all hosts",
            )
        return self.greet(request)

    def RegisterGraph(  # noqa: N802
        self, request: pb.RegisterGraphRequest, context: Any
    ) -> pb.RegisterGraphReply:
        self._check("RegisterGraph", request, context)
        try:
            return self.register_graph(request)
        except Exception as error:  # reaches the client, which raises it
            return pb.RegisterGraphReply(failure=described(error))

    def RegisterPart(  # noqa: N802
        self, request: pb.RegisterPartRequest, context: Any
    ) -> pb.RegisterPartReply:
        self._check("RegisterPart", request, context)
        return self.register_part(request)

    def _check(self, method: str, request: Any, context: Any) -> None:
        if not self.knows(method, request):
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the call has no proof of the secret for a handshake that this task has made",
            )

    def greet(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Answer a handshake."""
        nonce = self._connections.make_nonce(request.nonce)
        mpi = self._connections.mpi
        assert self._task.job is not None
        assert self._task.task is not None
        return pb.HelloReply(
            nonce=nonce,
            proof=digest(self._secret, b"server", request.nonce + nonce),
            cluster=self._connections.cluster.as_json(),
            job=self._task.job,
            task=self._task.task,
            generation=self._generation,
            data_port=self._connections.data_port,
            devices=[str(each) for each in self._worker.devices],
            machine=machine.identity(),
            local_name=self._connections.local_name,
            mpi_job="" if mpi is None else mpi.job,
            mpi_rank=0 if mpi is None else mpi.rank,
            left=self._connections.left(),
        )

    def knows(self, method: str, request: Any) -> bool:
        """Check the proof in a call, which is moved out of the request."""
        caller = pb.Caller()
        caller.CopyFrom(request.caller)
        request.ClearField("caller")
        expected = prove_call(self._secret, caller.nonces, method, request)
        return self._connections.knows_nonces(caller.nonces) and proves(caller.proof, expected)

    def register_graph(self, request: pb.RegisterGraphRequest) -> pb.RegisterGraphReply:
        """Place and split a client's graph, and register the parts with their tasks."""
        deadline = time.monotonic() + request.timeout
        graph, connections = decode(request.graph), self._connections
        wanted = [t for t in named_tasks(graph) if t != self._task and connections.has(t)]
        peers = connections.await_peers(wanted, request.timeout)
        devices = {self._task: self._worker.devices}
        for task, peer in peers.items():
            devices[task] = [DeviceName.parse(each) for each in peer.hello.devices]
        parts = plan(graph, connections.cluster, self._worker.devices[0], devices)
        others = [task for task in parts if task != self._task and task not in peers]
        left = max(deadline - time.monotonic(), DEAD_SECONDS)
        peers.update(connections.await_peers(others, left))
        generations = {self._name: self._generation}
        for task in parts:
            if task != self._task:
                generations[task_name(task)] = peers[task].hello.generation
        handle = self._new_handle(request.client)
        messages = {
            task: pb.RegisterPartRequest(
                handle=handle, part=encode(part.graph), generations=generations
            )
            for task, part in parts.items()
        }
        answers = self._register_parts(messages, peers, request.timeout)
        failed = [each for each in answers.values() if each.HasField("failure")]
        if failed:
            self._release(handle, [t for t, each in answers.items() if each not in failed])
            return pb.RegisterGraphReply(failure=failed[0].failure)
        reply = pb.RegisterGraphReply(handle=handle)
        for task, part in parts.items():
            reply.parts.append(
                pb.PartOf(
                    task=task_name(task),
                    address=connections.address(task),
                    feeds=part.feeds,
                    fetches=part.fetches,
                    missing=answers[task].missing,
                )
            )
        return reply

    def _new_handle(self, client: str) -> str:
        """Name a graph; with the generation, so that a restarted master reuses no handle."""
        self._handles += 1
        return f"{client}/{self._task.job}.{self._task.task}.{self._generation:x}.{self._handles}"

    def _register_parts(
        self,
        messages: Mapping[DeviceName, pb.RegisterPartRequest],
        peers: Mapping[DeviceName, Peer],
        timeout: float,
    ) -> dict[DeviceName, pb.RegisterPartReply]:
        """Register the parts of a graph on all tasks at once, and connect to these tasks."""

        def register(task: DeviceName) -> pb.RegisterPartReply:
            message = messages[task]
            if task == self._task:
                return self.register_part(message)
            try:
                reply: pb.RegisterPartReply = peers[task].call("RegisterPart", message, timeout)
                if not reply.HasField("failure"):  # the connection tells the task of this one's end
                    self._connections.channel(task, message.generations[task_name(task)])
            except AllreduceError as error:
                return pb.RegisterPartReply(failure=described(error))
            return reply

        with ThreadPoolExecutor(max(len(messages), 1)) as pool:
            return dict(zip(messages, pool.map(register, messages), strict=True))

    def _release(self, handle: str, tasks: Sequence[DeviceName]) -> None:
        """Forget the parts of a graph that could not be registered on all tasks."""
        for task in tasks:
            if task == self._task:
                self._worker.release([handle])
                continue
            with contextlib.suppress(PeerLostError):  # its parts are gone with it
                channel, _ = self._connections.connect(task)
                channel.send(Frame(pb.RELEASE, pb.Description(handle=handle)))

    def register_part(self, request: pb.RegisterPartRequest) -> pb.RegisterPartReply:
        """Compile this task's part of a graph; an error is in the reply."""
        try:
            return pb.RegisterPartReply(missing=self._worker.register(request))
        except Exception as error:  # reaches the client, by the master
            about = described(error)
            about.error = f"{self._name}: {about.error}"
            return pb.RegisterPartReply(failure=about)


def failure(error: Exception, request: int) -> Frame:
    """Answer a request by an error."""
    return Frame(pb.FAILED, described(error), request)


def described(error: Exception) -> pb.Description:
    """Describe an error for the client: with the traceback, unless its message says it all.

    It does not if code of the user's has run in this task, such as a kernel.
    """
    known = isinstance(error, AllreduceError) and not isinstance(error, InternalError)
    says_all = known and traces.users_line(error) is None
    notes = getattr(error, "__notes__", []) if says_all else [traces.text(error)]
    is_key = isinstance(error, KeyError) and len(error.args) == 1
    text = str(error.args[0] if is_key else error)  # a KeyError quotes its text when it is shown
    return pb.Description(error=text, error_kind=type(error).__name__, names=notes)
