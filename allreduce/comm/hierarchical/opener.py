"""How members come to talk in two levels: all meet, then those of each host, then the lanes."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from allreduce.cluster import World
from allreduce.comm import living
from allreduce.comm.communicator import Communicator
from allreduce.comm.hierarchical.layout import Layout
from allreduce.comm.hierarchical.ledger import Ledger
from allreduce.comm.hierarchical.runs import Level
from allreduce.comm.hierarchical.transport import HierarchicalTransport
from allreduce.comm.native import NativeTransport
from allreduce.comm.shared.opener import shared_transports
from allreduce.comm.tcp.opener import tcp_transports
from allreduce.comm.tcp.transport import TcpTransport


def open_hierarchical(
    world: World,
    local_members: int,
    *,
    name: str,
    timeout: float,
    hosts: Callable[[int], Hashable] | None = None,
) -> list[Communicator]:
    """Make this process's members of a communicator over all processes of the world.

    Args:
        world: Whose processes.
        local_members: How many members this process brings, each for a thread of its own.
        name: Names the communicator; the same on all ranks, and new in this world.
        timeout: Seconds that meeting, and later any wait, may last.
        hosts: Tells which host a member counts as on, in place of the evidence; for tests.

    Raises:
        UnsupportedError: Processes that seem to share a host cannot share memory.
        UsageError, JoinError, TimeoutError: As for tcp.
    """
    meeting = _meet(world, local_members, name, timeout, hosts)
    layout = meeting.layout
    ledgers = meeting.open(partial(tcp_transports, Ledger), range(layout.size), "all")
    levels: dict[int, dict[str, Level]] = {member: {} for member in ledgers}
    for members in layout.hosts:
        for part in _parts(layout, members):
            _add(levels, part, members, meeting.open(shared_transports, members, part))
    for number in range(layout.lanes if len(layout.hosts) > 1 else 0):
        members = tuple(sorted(host[number] for host in layout.hosts))
        lane = meeting.open(partial(tcp_transports, TcpTransport), members, f"lane {number}")
        _add(levels, "across", members, lane)
    transports = [
        HierarchicalTransport(ledger, levels[member], layout, timeout)
        for member, ledger in ledgers.items()
    ]
    for transport in transports:
        for level in levels[transport.index].values():
            level.transport.rename(tuple(transport.members[member] for member in level.numbers))
        living.add(transport)
    return [_communicator(world, transport, name) for transport in transports]


def _parts(layout: Layout, members: Sequence[int]) -> tuple[str, ...]:
    """Return what levels a host has."""
    if len(layout.hosts) == 1:
        return ("in",)  # it carries calls whole
    return ("in", "out") if len(members) > 1 else ()


T = TypeVar("T", bound=NativeTransport[Any])


@dataclass(frozen=True)
class _Meeting:
    """What a smaller communicator is made from."""

    world: World
    owners: tuple[int, ...]  # the rank of each member
    layout: Layout
    name: str
    timeout: float

    def open(
        self, opens: Callable[..., list[T]], members: Sequence[int], part: str
    ) -> dict[int, T]:
        """Make this process's members of a smaller communicator; called by all, in one order."""
        mine = [member for member in members if self.owners[member] == self.world.rank]
        if not mine:
            return {}
        name = f"{self.name}/{part}"
        world = self.world.subset(sorted({self.owners[member] for member in members}), name)
        made = opens(world, len(mine), name=name, timeout=self.timeout)
        return dict(zip(mine, made, strict=True))


def _meet(
    world: World,
    local_members: int,
    name: str,
    timeout: float,
    hosts: Callable[[int], Hashable] | None,
) -> _Meeting:
    key = f"{world.generation}/hierarchical/{name}"
    told = world.exchange(key, json.dumps(local_members).encode(), timeout)
    owners = tuple(rank for rank, count in enumerate(told) for _ in range(json.loads(count)))
    machines = [world.members[rank].machine for rank in owners]
    layout = Layout.of(machines if hosts is None else [hosts(m) for m in range(len(owners))])
    return _Meeting(world, owners, layout, name, timeout)


def _add(
    levels: dict[int, dict[str, Level]],
    name: str,
    members: Sequence[int],
    opened: dict[int, Any],
) -> None:
    for member, transport in opened.items():
        levels[member][name] = Level(transport, tuple(members))


def _communicator(world: World, transport: HierarchicalTransport, name: str) -> Communicator:
    size = len(transport.members)
    per_process = size == world.size
    return Communicator(
        transport,
        name=name,
        label=str(transport.members[transport.index]),
        rank=transport.index,
        size=size,
        local_rank=world.local_rank if per_process else transport.index,
        local_size=world.local_size if per_process else size,
    )
