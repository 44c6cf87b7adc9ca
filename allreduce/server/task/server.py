"""A task of a cluster as a server: gRPC for registering graphs, data connections for steps."""

from __future__ import annotations

import atexit
import contextlib
import json
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from allreduce import settings
from allreduce.cluster.host.address import is_loopback, split, unbound
from allreduce.cluster.leader.rpc import grpc
from allreduce.cluster.spec import ClusterSpec, own_task, parse_task
from allreduce.devices.integers import integer
from allreduce.devices.names import DeviceName
from allreduce.devices.options import start_logging
from allreduce.errors import JoinError, PeerLostError, TimeoutError, UnsupportedError, UsageError
from allreduce.events import logger
from allreduce.graph.core.host_future import Output
from allreduce.graph.partition.tasks import task_name
from allreduce.keywords import Refusing, explain
from allreduce.parameters.service import ParameterService
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol import task_pb2_grpc
from allreduce.server.protocol.channel import Channel
from allreduce.server.protocol.connect import OPTIONS, secret_of
from allreduce.server.protocol.frames import Frame
from allreduce.server.task.connections import Connections
from allreduce.server.task.service import Service, failure
from allreduce.server.task.worker import Worker

_Reply = tuple[pb.Description, Sequence[Output]]

_NOTHING = pb.Description()  # of an answer that consists of arrays
_THREADS = 16  # for registering; steps have the threads of their connection
_STOP_SECONDS = 20.0  # for gRPC to stop, which takes milliseconds on an idle machine
_POLL_SECONDS = 0.5  # seconds, between looks whether a task is up, or has ended


class Server(Refusing):
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
        self._secret = secret_of(secret)
        _check_secret(address, self._secret)
        self.generation = secrets.randbits(63)
        self.connections = Connections(
            self.cluster, self.task, self._secret, self._handle, self._lose
        )
        self.worker = Worker(self.task, self.connections.channel)
        self.parameters = ParameterService()
        self.service = Service(self.worker, self.connections, self.generation, self._secret)
        self._grpc = self._serve(address)
        self.connections.start()
        atexit.register(self._exit)
        _end_waiting_at_exit(self.connections)
        logger.info("[server] %s serves at %s", self.name, address)

    @explain()
    def join(self, task: str | None = None) -> None:
        """Block until `close()` is called, or until another task has ended.

        Args:
            task: The other task, such as "worker:0"; None to wait for `close()` only. The task has
                ended when it has closed its server or strategy, or exited without an exception. If
                it is not up yet, is lost otherwise or ended before this one began, this waits for
                it until the timeout (`ALLREDUCE_TIMEOUT`). Then it waits for the strategies of
                other workers.

        Raises:
            TimeoutError: The task has not come up, or not come back, in time.
        """
        if task is None:
            while not self.connections.closed.wait(_POLL_SECONDS):  # so that Ctrl-C is noticed
                pass
            return
        job, number = parse_task(task)
        self.cluster.address(job, number)
        other = DeviceName(job=job, replica=0, task=number)
        while (channel := self._await_task(other)) is not None and not channel.has_left:
            while not (channel.ended or self.connections.closed.wait(_POLL_SECONDS)):
                pass
        while self.connections.has_client() and not self.connections.closed.wait(_POLL_SECONDS):
            pass  # another worker's strategy, which may be reading its results

    def _await_task(self, task: DeviceName) -> Channel | None:
        """Connect to a task once it is up; None if it has ended, or this one has been closed."""
        timeout, name = settings.load().timeout, task_name(task)
        deadline = time.monotonic() + timeout
        while not self.connections.closed.is_set() and not self.connections.has_left(task):
            try:
                return self.connections.connect(task, _POLL_SECONDS)[0]
            except PeerLostError as error:
                lost = error
            if self.connections.others_say_left(task):
                return None
            if self.connections.has_client(task):  # a worker's strategy, without a server
                deadline = time.monotonic() + timeout
            if time.monotonic() > deadline:
                what = "come back" if self.connections.has_been_up(task) else "come up"
                raise TimeoutError(
                    f"[server] {name} has not {what} within {timeout:g} s; start it again, or "
                    f"end this task ({lost})"
                ) from lost
            self.connections.closed.wait(_POLL_SECONDS / 10)
        return None

    def close(self) -> None:
        """Stop serving; other tasks and clients see that this task has left."""
        atexit.unregister(self._exit)
        self._stop()

    def _exit(self) -> None:
        """End with the process: in good order, if no exception has ended it."""
        self._stop(in_order=getattr(sys, "last_value", None) is None, exits=True)

    def _stop(self, *, in_order: bool = True, exits: bool = False) -> None:
        stopped = self._grpc.stop(None)
        self.connections.close(in_order=in_order)
        if in_order:
            self.parameters.close()
        # Once gRPC gives the pool no more calls, its threads can end; at exit Python ends them.
        if not exits and stopped.wait(_STOP_SECONDS):
            self._pool.shutdown(wait=False)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        atexit.unregister(self._exit)
        self._stop(in_order=kind is None)

    def _serve(self, address: str) -> Any:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="allreduce-grpc")
        # Without keepalive no connection has TCP_USER_TIMEOUT, which gRPC's servers set to 20 s and
        # which would end that of a client that is stopped while it is sent something.
        own = [("grpc.so_reuseport", 0), ("grpc.keepalive_time_ms", 2**31 - 1)]
        made = grpc.server(self._pool, options=[*OPTIONS, *own])
        task_pb2_grpc.add_TaskServicer_to_server(self.service, made)  # type: ignore[no-untyped-call]
        try:
            bound = made.add_insecure_port(address)
        except RuntimeError:
            bound = 0
        if not bound:
            self.connections.close()
            raise JoinError(f"[server] {self.name} cannot listen at {address}: {unbound(address)}")
        made.start()
        return made

    # --- data connections ---

    def _lose(self, name: str, why: str, has_left: bool) -> None:
        self.worker.lose(name, why)
        self.parameters.lose(name, has_left=has_left)

    def _handle(self, channel: Channel, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        kind, about = frame.kind, frame.about
        if kind == pb.TENSOR:
            self.worker.deliver(frame, arrays[0])
        elif kind == pb.ABORT:
            self.worker.abort(about.handle, frame.step, PeerLostError(about.error))
        else:
            if kind != pb.RUN or not self.worker.is_quick(about.handle):
                channel.hand_over()
            if kind == pb.RELEASE:
                self.worker.release([about.handle])
            elif kind in _ANSWERS:
                self._answer(channel, frame, arrays)

    def _answer(self, channel: Channel, frame: Frame, arrays: Sequence[np.ndarray]) -> None:
        results: Sequence[Output]
        try:
            about, results = _ANSWERS[frame.kind](self, channel.peer, frame, arrays)
            reply = Frame(pb.DONE, about, frame.request)
        except Exception as error:  # reaches the client, which raises it
            reply, results = failure(error, frame.request), ()
        try:
            channel.send(reply, results)
        except PeerLostError:
            return  # the client is gone
        except UnsupportedError as error:
            with contextlib.suppress(PeerLostError):
                channel.send(failure(error, frame.request))

    def _run(self, _: str, frame: Frame, arrays: Sequence[np.ndarray]) -> _Reply:
        return _NOTHING, self.worker.run(frame, arrays)

    def _read(self, _: str, frame: Frame, __: Sequence[np.ndarray]) -> _Reply:
        return _NOTHING, self.worker.read(frame.about.names)

    def _assign(self, _: str, frame: Frame, arrays: Sequence[np.ndarray]) -> _Reply:
        self.worker.assign(frame.about.names, arrays, frame.about.if_missing)
        return _NOTHING, ()

    def _list(self, _: str, __: Frame, ___: Sequence[np.ndarray]) -> _Reply:
        tasks = self.connections.tasks()
        return pb.Description(names=[f"{task}={lives:d}" for task, lives in tasks.items()]), ()

    def _call(self, caller: str, frame: Frame, arrays: Sequence[np.ndarray]) -> _Reply:
        about = frame.about
        found, results = self.parameters.call(caller, about.method, json.loads(about.json), arrays)
        return pb.Description(json=json.dumps(found)), results


_ANSWERS: Mapping[int, Callable[[Server, str, Frame, Sequence[np.ndarray]], _Reply]] = {
    pb.RUN: Server._run,
    pb.READ: Server._read,
    pb.ASSIGN: Server._assign,
    pb.TASKS: Server._list,
    pb.CALL: Server._call,
}


def _end_waiting_at_exit(connections: Connections) -> None:
    """End waiting for tasks when the process exits.

    Python joins the threads of pools, gRPC's among them, before it calls `atexit` functions. Only
    functions registered here run earlier.
    """
    end = weakref.WeakMethod(connections.end_waiting)  # a closed server can be collected

    def run() -> None:
        if (found := end()) is not None:
            found()

    threading._register_atexit(run)  # type: ignore[attr-defined]  # concurrent.futures uses it


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
    number = 0 if number is None else integer("[server] task_index", number)
    spec.address(job, number)
    return spec, job, number


def _check_secret(address: str, secret: bytes) -> None:
    if not secret and not is_loopback(split(address)[0]):
        raise UsageError(
            f"[server] {address} is not a loopback address, and there is no secret: anybody on "
            "the network could run programs here; set ALLREDUCE_SECRET to the same random text "
            "on all tasks and clients"
        )
