"""The group leader as a gRPC server on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from typing import Any

from allreduce.cluster.host import address_space, fd_limits
from allreduce.cluster.host.address import check_loopback, check_secret, unresolved
from allreduce.cluster.leader.group import Group
from allreduce.cluster.leader.rpc import LEFT, grpc, leader_pb2_grpc, server_options, silence
from allreduce.cluster.leader.session import STRANGERS, Session
from allreduce.cluster.process import forks
from allreduce.cluster.world import Member
from allreduce.errors import JoinError

START_SECONDS = 10.0
QUIET_SECONDS = 2.0  # without a request from anybody
_FAILED_SECONDS = 2.0  # how long a leader stays whose host has failed
_FAILED_QUIET_SECONDS = 0.5  # without a request from anybody; a read that is due takes milliseconds
_POLL_SECONDS = 0.02
_GOODBYE_SECONDS = 1.0  # for the calls to end after the members have been told


class Leader:
    """Hosts the groups of one job until `close()`.

    Args:
        address: `host:port`; port 0 takes a free one. See `address` afterwards.
        size: How many ranks the job has.
        secret: What members have to know.
        timeout: The job's, and seconds without a heartbeat after which a connected member counts as
            lost, but for short ones. A process that dies is noticed at once, by its connection;
            this is for severed networks and stopped processes.
        generation: The only generation to serve, for a leader that ends with its host's world; the
            launcher's serves all.

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
        fd_limits.check(fd_limits.leader_files(size), wanted)
        address_space.check(address_space.leader_threads(), wanted)
        self._strangers = fd_limits.for_strangers(STRANGERS)
        self.size, self.secret, self.silence = size, secret, silence(timeout)
        self.generation = generation
        self.address = address
        self.groups: dict[int, Group] = {}
        self.ended: dict[int, Member] = {}
        self.closing = False
        self.left = False  # whether it ends because its host leaves in good order
        self.attending = 0  # members that are connected
        self.asked = time.monotonic()  # when one of them last made a request
        # Tells why the server did not start. Not an Event: an interrupt within its wait may surface
        # as a RuntimeError.
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
        """The rank that was lost first, in any generation, and not for want of another."""
        groups = list(self.groups.values())  # the loop's thread adds to them
        found = [group.culprit for group in groups]
        return next((rank for rank in found if rank is not None), None)

    @property
    def victims(self) -> set[int]:
        """The ranks that have said that they end for want of another."""
        return set().union(*(group.victims for group in list(self.groups.values())))

    @property
    def ending(self) -> set[int]:
        """The ranks that have said that they end, or may be saving because another is lost."""
        return set().union(*(group.ending for group in list(self.groups.values())))

    def end(self, rank: int, pid: int) -> None:
        """Note that a rank's process has ended normally: those who wait for it to join are told."""

        def note() -> None:
            self.ended[rank] = Member(rank, socket.gethostname(), pid)
            for group in self.groups.values():
                group.give_up()

        assert self._loop is not None  # it has started
        with contextlib.suppress(RuntimeError):  # the loop has just ended
            self._loop.call_soon_threadsafe(note)

    def close(self, drain: float = 0.0) -> None:
        """Stop, after waiting up to `drain` seconds for members that still ask for something.

        Members that are connected and quiet compute, or wait for each other elsewhere: they may do
        so for hours, and notice nothing.
        """
        self.left = drain > 0
        self._end(drain, QUIET_SECONDS)

    def fail(self) -> None:
        """Stop for an error of the host's, after members have read what they are just about to.

        What they have told each other may be the error itself, which each is to raise.
        """
        self._end(_FAILED_SECONDS, _FAILED_QUIET_SECONDS)

    def _end(self, drain: float, quiet: float) -> None:
        self.closing = True
        deadline = time.monotonic() + drain
        while self.attending and time.monotonic() < min(deadline, self.asked + quiet):
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
        except RuntimeError:  # gRPC's text tells how to debug gRPC, not why
            why = unresolved(self.address) or "the address is in use, or not of this machine"
            raise OSError(why) from None
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await server.start()
        self._started.put(None)
        await self.stop.wait()
        await server.stop(grace=_GOODBYE_SECONDS)
        # The calls are over, but what serves them may not be: gRPC prints the traceback of a call
        # that is cancelled with the loop, while its member's end is cancelling it already.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_GOODBYE_SECONDS)


class _Servicer(leader_pb2_grpc.LeaderServicer):
    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    async def Attend(self, _: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Serve one member in a task of its own, so that no end of the call cancels it midway."""
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
