"""The group leader: a gRPC server on an event loop in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from typing import Any

from allreduce.cluster.host import limits
from allreduce.cluster.host.address import check_loopback, check_secret, unbound
from allreduce.cluster.leader.group import Group
from allreduce.cluster.leader.rpc import (
    LEFT,
    grpc,
    leader_pb2_grpc,
    longest_silence,
    server_options,
)
from allreduce.cluster.leader.session import STRANGERS, Session
from allreduce.cluster.process import forks
from allreduce.cluster.world import Member
from allreduce.errors import JoinError

START_SECONDS = 10.0
QUIET_SECONDS = 2.0  # without requests, after which a closing leader ends
_FAILED_SECONDS = 2.0  # that a leader stays after its host has failed
_FAILED_QUIET_SECONDS = 0.5  # without requests; a pending read takes milliseconds
_POLL_SECONDS = 0.02
_GOODBYE_SECONDS = 1.0  # for the calls to end after the members were informed


class Leader:
    """Hosts the groups of one job until `close()`.

    Args:
        address: `host:port`; port 0 takes a free one. See `address` afterwards.
        timeout: The job's timeout; unless it is short, also the seconds without a heartbeat after
            which a connected member counts as lost. A death is noticed at once by its connection;
            heartbeats detect severed networks and stopped processes.
        generation: The only generation to serve, if the leader ends with its host's world; the
            launcher's leader serves all.

    Raises:
        JoinError: Nothing can listen at `address`, or too few files may be open.
        UsageError: `address` is not loopback and `secret` is empty.
    """

    def __init__(
        self,
        address: str,
        size: int,
        secret: bytes,
        timeout: float = 300.0,
        generation: int | None = None,
    ) -> None:
        check_secret(address, secret)
        wanted = f"[cluster] no group leader of {size} ranks can listen at {address}"
        check_loopback(address)
        limits.check_files(limits.leader_files(size), wanted)
        limits.check_address_space(limits.leader_threads(), wanted)
        self._strangers = limits.max_unproven_connections(STRANGERS)
        self.size, self.secret, self.silence = size, secret, longest_silence(timeout)
        self.generation = generation
        self.address = address
        self.groups: dict[int, Group] = {}
        self.ended: dict[int, Member] = {}
        self.closing = False
        self.left = False  # whether its host process leaves without an error
        self.attending = 0  # members that are connected
        self.asked = time.monotonic()  # time of the last request
        # The error if the server did not start, else None. Not an Event: an interrupt within its
        # wait may surface as a RuntimeError.
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="allreduce-leader", daemon=True)
        self._thread.start()
        try:
            failure = self._started.get(timeout=START_SECONDS)
        except queue.Empty:
            failure = TimeoutError("the server did not start")
        if failure is not None:
            raise JoinError(f"[cluster] no group leader can listen at {address}: {failure}")
        forks.hold(self)

    @property
    def culprit(self) -> int | None:
        """The rank that was lost first, in any generation, and is no victim."""
        groups = list(self.groups.values())  # the loop's thread adds to them
        found = [group.culprit for group in groups]
        return next((rank for rank in found if rank is not None), None)

    @property
    def victims(self) -> set[int]:
        """The ranks that reported to end because another rank was lost."""
        return set().union(*(group.victims for group in list(self.groups.values())))

    @property
    def ending(self) -> set[int]:
        """The ranks that reported to be ending, or saving because another rank was lost.

        Ranks that have left are ending, too, unless they have joined another generation.
        """
        groups = list(self.groups.values())
        left = set[int]().union(*(group.left for group in groups))
        left.difference_update(*(group.connected for group in groups))
        return left.union(*(group.ending for group in groups))

    def reason(self, rank: int) -> str:
        """Return the error by which a rank has reported to end; "" if it has not."""
        groups = list(self.groups.values())
        return next((group.reasons[rank] for group in groups if rank in group.reasons), "")

    def end(self, rank: int, pid: int) -> None:
        """Record that a rank's process ended normally; fails the joins that wait for it."""

        def note() -> None:
            self.ended[rank] = Member(rank, socket.gethostname(), pid)
            for group in self.groups.values():
                group.give_up()

        assert self._loop is not None  # it has started
        with contextlib.suppress(RuntimeError):  # the loop has just ended
            self._loop.call_soon_threadsafe(note)

    def close(self, drain: float = 0.0) -> None:
        """Stop, after up to `drain` seconds in which members still join or send requests.

        Connected members that do neither are computing, or waiting for each other elsewhere, maybe
        for hours; they do not need the leader.
        """
        self.left = drain > 0
        self._end(drain, QUIET_SECONDS)

    def fail(self) -> None:
        """Stop after an error of the host, once members have finished their pending reads.

        They may be reading that error from the store, in order to raise it.
        """
        self._end(_FAILED_SECONDS, _FAILED_QUIET_SECONDS)

    def _end(self, drain: float, quiet: float) -> None:
        self.closing = True
        deadline = time.monotonic() + drain
        while self.attending and time.monotonic() < deadline:
            is_joining = any(group.joining for group in list(self.groups.values()))
            if not is_joining and time.monotonic() >= self.asked + quiet:
                break
            time.sleep(_POLL_SECONDS)
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self.stop.set)
            self._thread.join(START_SECONDS)
        forks.release(self)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # handed to the constructor, which raises it
            self._started.put(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = grpc.aio.server(options=server_options(self.size + self._strangers))
        leader_pb2_grpc.add_LeaderServicer_to_server(_Servicer(self), server)  # type: ignore[no-untyped-call]
        try:
            port = server.add_insecure_port(self.address)
        except RuntimeError:  # gRPC's text explains how to debug gRPC, not the cause
            raise OSError(unbound(self.address)) from None
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await server.start()
        self._started.put(None)
        await self.stop.wait()
        await server.stop(grace=_GOODBYE_SECONDS)
        # The calls are over, but their tasks may not be: gRPC prints the traceback of a task that
        # is cancelled with the loop while its member's end already cancels it.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_GOODBYE_SECONDS)


class _Servicer(leader_pb2_grpc.LeaderServicer):
    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    async def Attend(self, _: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Serve one member in its own task, so that the end of the call cannot cancel it midway."""
        serving = asyncio.create_task(Session(self._leader, context).serve())
        stopping = asyncio.create_task(self._leader.stop.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            return  # the member's connection broke
        finally:
            if self._leader.left:
                context.set_trailing_metadata(((LEFT, "1"),))
            for task in (serving, stopping):
                task.cancel()
            await asyncio.wait((serving, stopping))
