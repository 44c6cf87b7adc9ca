"""A worker's connections to the parameter servers: calls that outlive a lost connection."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.cluster.host.waiting import Wait
from allreduce.cluster.spec import ClusterSpec
from allreduce.errors import ClosedError, JoinError, PeerLostError, TimeoutError, UsageError
from allreduce.events import logger
from allreduce.server.client.requests import raise_failure
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.channel import DEAD_SECONDS, Answer, Channel
from allreduce.server.protocol.connect import Peer, client_of
from allreduce.server.protocol.frames import Frame

_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 0.1
_DYING_SECONDS = DEAD_SECONDS + 2.0  # until a server has noticed that a worker is dead
WORKERS = ("chief", "master", "worker")  # jobs whose tasks train; the first task is the chief
Arrays = Sequence[np.ndarray]
Reply = tuple[dict[str, Any], Arrays]


@dataclass(slots=True)
class Call:
    """A call that has been sent; `ParameterServer.finish` returns its results."""

    method: str
    fields: Mapping[str, Any]
    arrays: Arrays
    answer: Answer
    channel: Channel | None


class ParameterServer:
    """One `ps` task as a worker sees it; safe to use from several threads, as a step's lookups are.

    Args:
        name: The task: "/job:ps/task:0".
        address: Its `host:port`.
        identity: This worker's name, unique among processes.
        secret: The cluster's secret.
        timeout: Seconds to wait for the task if it is not up, or lost.
        connected: Called after each new connection, before any other call goes over it.

    Attributes:
        generation: The number of the task's process that was connected to last; None for none.
        nbytes: The bytes of arguments and results of all calls, in both directions.
    """

    def __init__(
        self,
        name: str,
        address: str,
        identity: str,
        secret: bytes,
        timeout: float,
        connected: Callable[[ParameterServer], None],
    ) -> None:
        self.name = name
        self._address, self.identity = address, identity
        self._connections = 0
        self._secret, self._timeout, self._connected = secret, timeout, connected
        self._channel: Channel | None = None
        self._sending = threading.RLock()  # also of what `connected` calls
        self.generation: int | None = None
        self._past: set[int] = set()  # generations before it
        self._lost_at: float | None = None  # when the connection was lost
        self._closed = False
        self.nbytes = 0
        atexit.register(self._exit)

    def call(self, method: str, fields: Mapping[str, Any], arrays: Arrays = ()) -> Reply:
        """Run a method of the task's service; blocks until it has ended.

        A call whose connection is lost is made again, so methods can be repeated.

        Raises:
            TimeoutError: The task is lost, and has not come back in time.
            AllreduceError: What the method has raised.
        """
        return self.finish(self.start(method, fields, arrays))

    def start(self, method: str, fields: Mapping[str, Any], arrays: Arrays = ()) -> Call:
        """Send a call; its arrays may not change before `finish`."""
        call = Call(method, fields, arrays, Answer(), None)
        with contextlib.suppress(PeerLostError):  # `finish` sends it again
            self._send(call)
        return call

    def finish(self, call: Call) -> Reply:
        """Wait for the results of a call; see `call`."""
        while True:
            if call.channel is None or not self._has_come(call):
                with contextlib.suppress(PeerLostError):
                    self._send(call)
                continue
            frame = call.answer.frame
            assert frame is not None
            if frame.kind == pb.FAILED:
                raise_failure(frame.about, f"raised by {self.name}")
            with self._sending:
                self.nbytes += len(frame.about.json) + sum(a.nbytes for a in call.answer.arrays)
            return json.loads(frame.about.json), call.answer.arrays

    def finish_or_lose(self, call: Call) -> Reply | None:
        """Wait for the results of a call; None if the connection was lost, and with it the call."""
        return self.finish(call) if call.channel is not None and self._has_come(call) else None

    def _send(self, call: Call) -> None:
        about = pb.Description(method=call.method, json=json.dumps(call.fields))
        call.channel = None  # if it is lost again
        with self._sending:
            channel = self._open()
            self.nbytes += len(about.json) + sum(each.nbytes for each in call.arrays)
        call.answer = channel.request(Frame(pb.CALL, about), call.arrays)
        call.channel = channel

    def _has_come(self, call: Call) -> bool:
        """Wait for an answer; returns False if the connection is lost before."""
        assert call.channel is not None
        while not call.channel.wait(call.answer, _LOOK_SECONDS):
            if call.channel.ended and not call.answer.came:
                break
        if call.answer.frame is None:
            call.channel = None
        return call.channel is not None

    def _open(self) -> Channel:
        """Return the connection; a new one if it was lost.

        Raises:
            TimeoutError: The task does not answer in time.
        """
        if self._closed:
            raise ClosedError(
                f"[parameter server] the strategy's connection to {self.name} is closed"
            )
        if self._channel is not None and not self._channel.ended:
            return self._channel
        try:
            channel = self._connect()
        except TimeoutError as error:
            if self.generation is None:
                raise
            raise TimeoutError(
                f"[parameter server] {self.name} at {self._address} was lost, and has not come "
                f"back within {self._timeout:g} s: if it runs, check the network; else start it "
                "again (--restarts does), and the workers: with checkpoint=, they go on from there"
            ) from error
        self._channel = channel
        self._connected(self)
        return channel

    def _connect(self) -> Channel:
        deadline = time.monotonic() + self._timeout
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            peer = Peer(self._address, self._secret, left, self.name)
            try:
                if peer.hello.generation in self._past:  # cut off meanwhile, and replaced
                    raise JoinError(
                        f"[parameter server] the process at {self._address} is an earlier one of "
                        f"{self.name}, which a newer one has replaced; end it"
                    )
                # A name for each: the end of an earlier connection is not taken for this one's.
                self._connections += 1
                name = f"{self.identity}.{self._connections}"
                channel = peer.open(name, None, self._lose)
                break
            except JoinError as error:  # it may have ended between the two
                if time.monotonic() > deadline:
                    raise TimeoutError(str(error)) from error
                time.sleep(_RETRY_SECONDS)
            finally:
                peer.close()
        if self._lost_at is not None:
            how = "" if peer.hello.generation == self.generation else " after a restart"
            seconds = time.monotonic() - self._lost_at
            logger.warning("[parameter server] %s is back%s, %.1f s later", self.name, how, seconds)
        if self.generation not in (None, peer.hello.generation):
            self._past.add(self.generation)
        self.generation, self._lost_at = peer.hello.generation, None
        return channel

    def _lose(self, channel: Channel, why: str) -> None:
        if not self._closed and not channel.was_interrupted and self._lost_at is None:
            self._lost_at = time.monotonic()
            logger.warning(
                "[parameter server] %s is lost: %s; waiting up to %g s for it",
                *(self.name, why, self._timeout),
            )

    def close(self) -> None:
        """End the connection; the task sees that this worker has not failed."""
        atexit.unregister(self._exit)
        self._closed = True
        if self._channel is not None:
            self._channel.leave()

    def _exit(self) -> None:
        """End with the process: in good order, if no exception has ended it."""
        if getattr(sys, "last_value", None) is None:
            self.close()


def connect_all(
    cluster: ClusterSpec,
    task: str,
    secret: bytes,
    timeout: float,
    joined: Callable[[ParameterServer], None] = lambda _: None,
    checkpoint: str | None = None,
) -> list[ParameterServer]:
    """Connect a worker to all tasks of `ps`.

    Args:
        cluster: The cluster.
        task: The worker, such as "worker:1".
        secret: The cluster's secret.
        timeout: Seconds to wait for a task that is not up, or lost.
        joined: Called with the first server after each new connection to it.
        checkpoint: The folder in which servers are to write checkpoints; None for no checkpoints.

    Raises:
        TimeoutError: A task does not answer in time; names it.
        UsageError: A task cannot write checkpoints, or another process is the same worker.
        AllreduceError: What `joined` has raised.
    """
    tasks = [f"{job}:{number}" for job, number, _ in cluster if job in WORKERS]
    described = {"task": task, "is_chief": task == tasks[0], "workers": len(tasks)}
    described["process"] = f"process {os.getpid()} on {socket.gethostname()}"

    def enter(server: ParameterServer) -> None:
        wait = Wait(_DYING_SECONDS)
        while other := server.call("enter", described)[0].get("other"):
            if not wait.has_time_left(f"{other} to end"):
                raise UsageError(
                    f"[parameter server] {task}: {other} is this task already; give each process a "
                    "task of its own in ALLREDUCE_TASK"
                )
        if server is made[0]:
            joined(server)

    job, _, number = task.partition(":")
    identity = client_of(f"/job:{job}/task:{number}", secrets.token_hex(8))
    made = [
        ParameterServer(
            f"/job:ps/task:{number}",
            cluster.address("ps", number),
            identity,
            secret,
            timeout,
            enter,
        )
        for job, number, _ in cluster
        if job == "ps"
    ]
    try:
        for server in made:
            server.call("status", {})
            if checkpoint is not None:
                server.call("check_folder", {"folder": checkpoint, "server": server.name})
    except BaseException:  # else the others would take this worker for one that lives
        for server in made:
            server.close()
        raise
    return made
