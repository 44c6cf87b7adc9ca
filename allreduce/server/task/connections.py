"""The connections between one task, the other tasks of its cluster, and its clients."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from allreduce import settings
from allreduce.cluster.host.address import joined, split
from allreduce.cluster.leader.proof import NONCE_BYTES
from allreduce.cluster.spec import ClusterSpec
from allreduce.devices.names import DeviceName
from allreduce.errors import ClosedError, JoinError, PeerLostError, TimeoutError
from allreduce.events import logger
from allreduce.graph.partition.tasks import task_name
from allreduce.server.protocol.channel import BEAT_SECONDS, DEAD_SECONDS, Channel, Handle
from allreduce.server.protocol.connect import Peer, task_of
from allreduce.server.protocol.data_handshake import accept
from allreduce.server.protocol.mpi_messages import MpiMessages

_THREADS = 16  # that ask tasks whether they live
_ASK_SECONDS = 0.2
_MOST_NONCES = 10_000
_HANDSHAKES = 64  # strangers and others that may be connecting at the same time


class Connections:
    """Connects a task to the others of its cluster, and accepts their data connections.

    Args:
        cluster: The cluster.
        task: This task, as a device name without a device.
        secret: The cluster's secret.
        handle: Called with each frame that arrives on a data connection.
        lost: Called with the name of a task or client whose data connection has ended, why, and
            whether the other end has closed it in good order.

    Attributes:
        name: This task's name: "/job:ps/task:0".
        closed: Set once this task is closed.
        data_port: The port at which data connections are accepted.
        local_name: The abstract Unix socket at which this host's processes may connect instead.
        mpi: Carries large arrays between ranks of one MPI job; None if there is none.

    Raises:
        JoinError: Nothing can listen at the task's address.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        task: DeviceName,
        secret: bytes,
        handle: Handle,
        lost: Callable[[str, str, bool], None],
    ) -> None:
        self.cluster, self.task, self.name = cluster, task, task_name(task)
        self._secret, self._handle, self._on_lost = secret, handle, lost
        self.mpi = MpiMessages() if settings.load().transport == "mpi" else None
        self.closed = threading.Event()
        self._waiting_ended = threading.Event()
        self._peers: dict[str, Peer] = {}
        self._channels: dict[str, tuple[Channel, int]] = {}  # by task, with its generation
        self._inbound: set[Channel] = set()
        self._connecting = threading.RLock()
        self._opening: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by task
        self._nonces: dict[bytes, bool] = {}  # and whether a data connection has used it
        self._lost: set[str] = set()  # tasks without a connection, which had one
        self._left: dict[str, float] = {}  # when those of them closed it that did so in good order
        self._began = time.monotonic()
        self._handshakes = threading.Semaphore(_HANDSHAKES)
        listener = _listen(split(self.address(task))[0])
        self.data_port: int = listener.getsockname()[1]
        self.local_name = f"allreduce-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX)
        local.bind(f"\0{self.local_name}")
        local.listen(128)
        self._listeners = listener, local

    def start(self) -> None:
        """Accept data connections, in the background."""
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="allreduce-server", daemon=True
            ).start()

    def end_waiting(self) -> None:
        """End all waiting for tasks, with an error; data connections stay."""
        self._waiting_ended.set()
        with self._connecting:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    def close(self, *, in_order: bool = True) -> None:
        """Close all connections; `in_order` tells the other ends that this task has not failed."""
        self.closed.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._connecting:
            channels = [each for each, _ in self._channels.values()] + [*self._inbound]
        # Without the lock, which steps that end now may need.
        for channel in channels:
            if in_order:
                channel.leave()
            else:
                channel.end("this task has failed")
        self.end_waiting()

    def has(self, task: DeviceName) -> bool:
        """Whether the cluster has a task."""
        return any((job, number) == (task.job, task.task) for job, number, _ in self.cluster)

    def address(self, task: DeviceName) -> str:
        """Return a task's `host:port`."""
        assert task.job is not None
        assert task.task is not None
        return self.cluster.address(task.job, task.task)

    # --- to other tasks ---

    def await_peers(self, tasks: Sequence[DeviceName], timeout: float) -> dict[DeviceName, Peer]:
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
        missing = [f"{task_name(t)} at {self.address(t)}" for t, p in found.items() if p is None]
        if missing:
            raise TimeoutError(
                f"[server] no answer from {', '.join(missing)} within {timeout:g} s; start what is "
                "missing, or check the cluster's addresses"
            )
        return {task: peer for task, peer in found.items() if peer is not None}

    def _peer(self, task: DeviceName, timeout: float) -> Peer:
        """Greet another task, which may have restarted meanwhile."""
        address = self.address(task)
        with self._connecting:
            peer = self._peers.get(address)
        if peer is None:
            peer = Peer(address, self._secret, timeout, task_name(task), self._waiting_ended)
            with self._connecting:
                self._peers[address] = peer
        else:
            peer.greet(timeout)
        return peer

    def channel(self, task: DeviceName, generation: int) -> Channel:
        """Return the data connection to a task of a generation."""
        channel, found = self.connect(task)
        if found != generation:
            raise PeerLostError(
                f"[server] {task_name(task)} has restarted since the graph was registered"
            )
        return channel

    def connect(self, task: DeviceName, timeout: float = DEAD_SECONDS) -> tuple[Channel, int]:
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
            channel = peer.open(self.name, self._handle, self._lose, mpi=self.mpi)
        except (ClosedError, JoinError, TimeoutError) as error:
            raise PeerLostError(f"[server] {name} is lost: {error}") from error
        with self._connecting:
            if not (channel.ended or self.closed.is_set()):
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
        self._left.pop(name, None)

    def _lose(self, channel: Channel, why: str) -> None:
        """Note the end of a data connection, in either direction."""
        name = task_of(channel.peer)
        with self._connecting:
            self._inbound.discard(channel)
            known = self._channels.get(name)
            if known is not None and known[0] is channel:
                del self._channels[name]
            if name.startswith("/job:") and not self.closed.is_set():
                if channel.has_left:
                    self._left[name] = time.monotonic()
                if name == channel.peer:  # the parameter service tells of clients
                    self._note_loss(channel, why)
        self._on_lost(channel.peer, why, channel.has_left)

    def _note_loss(self, channel: Channel, why: str) -> None:
        name = channel.peer
        if channel.has_left:
            logger.debug("[server] %s: %s has left", self.name, name)
        elif name not in self._lost:
            logger.warning("[server] %s has lost %s: %s", self.name, name, why)
        self._lost.add(name)

    def tasks(self) -> dict[str, bool]:
        """Ask all tasks of the cluster whether they live."""
        pool = ThreadPoolExecutor(_THREADS)
        tasks = self._tasks()
        with pool:
            living = list(pool.map(self._lives, tasks))
        return {task_name(task): lives for task, lives in zip(tasks, living, strict=True)}

    def _lives(self, task: DeviceName) -> bool:
        if task == self.task:
            return True
        try:
            self._peer(task, DEAD_SECONDS if task_name(task) in self._channels else BEAT_SECONDS)
        except (ClosedError, JoinError, TimeoutError):
            return False
        return True

    def has_client(self, task: DeviceName | None = None) -> bool:
        """Whether a client of a task's program, or of any, is connected: a worker's strategy."""
        with self._connecting:
            clients = [task_of(e.peer) for e in self._inbound if task_of(e.peer) != e.peer]
        return bool(clients) if task is None else task_name(task) in clients

    def has_left(self, task: DeviceName) -> bool:
        """Whether a task has closed its connection in good order, and is not back."""
        return task_name(task) in self._left

    def left(self) -> dict[str, float]:
        """Return for each task that `has_left`, as far as this one knows, the seconds since."""
        return {name: time.monotonic() - since for name, since in list(self._left.items())}

    def others_say_left(self, task: DeviceName) -> bool:
        """Ask the other tasks whether one has left since this one began.

        A task that ends before it has met this one has told only those that it needed. One that
        left earlier may be of a job before, on the same servers.
        """

        def ask(other: DeviceName) -> bool:
            try:
                left = self._peer(other, _ASK_SECONDS).hello.left
            except (ClosedError, JoinError, TimeoutError):
                return False
            return left.get(task_name(task), float("inf")) < time.monotonic() - self._began

        others = [each for each in self._tasks() if each not in (self.task, task)]
        with ThreadPoolExecutor(_THREADS) as pool:
            return any(pool.map(ask, others))

    def _tasks(self) -> list[DeviceName]:
        return [DeviceName(job=job, replica=0, task=number) for job, number, _ in self.cluster]

    def has_been_up(self, task: DeviceName) -> bool:
        """Whether a task that cannot be reached now has been connected before."""
        return task_name(task) in self._lost

    # --- from other tasks and clients ---

    def make_nonce(self, theirs: bytes) -> bytes:
        """Return this task's nonce for a handshake, and remember the pair."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces[theirs + nonce] = False
        while len(self._nonces) > _MOST_NONCES:
            self._nonces.pop(next(iter(self._nonces)))
        return nonce

    def knows_nonces(self, nonces: bytes) -> bool:
        """Whether a handshake with this task made these nonces."""
        return nonces in self._nonces

    def _accept(self, listener: socket.socket) -> None:
        while not self.closed.is_set():
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
            if self.closed.is_set():
                connection.close()
                return
            channel = Channel(connection, peer, self._handle, self._lose, mpi=self.mpi)
            if not channel.ended:
                self._inbound.add(channel)
                self._find(task_of(peer))

    def _take_nonces(self, nonces: bytes) -> bool:
        """Return whether a handshake made these nonces, for the first data connection only."""
        if self._nonces.get(nonces, True):
            return False
        self._nonces[nonces] = True
        return True


def _listen(host: str) -> socket.socket:
    """Listen for data connections at a free port of a host's address."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise JoinError(
            f"[server] the host {host!r} of this task's address does not resolve "
            f"({error.strerror}); check the cluster's addresses"
        ) from error
    family, kind, proto, _, address = found[0]
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
