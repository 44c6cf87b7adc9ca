"""The sockets of this process's members while a tcp communicator is made."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field

from allreduce import _native
from allreduce.cluster import World
from allreduce.comm.transports.handshake import Credentials


@dataclass(frozen=True)
class Process:
    """One process of the communicator, as it announces itself to the others."""

    rank: int
    pid: int
    local_members: int
    host: str
    port: int
    channels: int


@dataclass
class Mesh:
    """The sockets of this process's members, by (member, peer, channel)."""

    world: World
    credentials: Credentials
    processes: tuple[Process, ...]
    sockets: dict[tuple[int, int, int], socket.socket] = field(default_factory=dict)

    @property
    def owners(self) -> list[int]:
        """The rank of every member."""
        return [p.rank for p in self.processes for _ in range(p.local_members)]

    @property
    def local(self) -> list[int]:
        """This process's members."""
        return [m for m, rank in enumerate(self.owners) if rank == self.world.rank]

    @property
    def channels(self) -> int:
        return self.processes[0].channels

    def expected(self, caller: bool) -> set[tuple[int, int, int]]:
        """Return the (own member, peer, channel) of all connections to make, or to accept."""
        members = range(len(self.owners))
        return {
            (mine, other, channel)
            for mine in self.local
            for other in members
            for channel in range(self.channels)
            if (other < mine if caller else other > mine)
        }

    def give_up(self, reason: str) -> None:
        """Close the connections after sending the reason to the peers.

        Peers that have begun already would otherwise take this process for dead.
        """
        for (mine, _, channel), sock in self.sockets.items():
            if channel == 0:
                with contextlib.suppress(OSError):  # the peer is gone
                    sock.setblocking(False)
                    sock.send(_native.tcp_abort_frame(mine, reason))
        self.close()

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()
