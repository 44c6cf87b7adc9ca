"""Open the hierarchical transport: connect all members, then each host's, then the lanes."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from allreduce import settings
from allreduce.cluster import World
from allreduce.comm.core.transport import LevelTransport
from allreduce.comm.transports.hierarchical.control_channel import ControlChannel
from allreduce.comm.transports.hierarchical.layout import Layout
from allreduce.comm.transports.hierarchical.levels import Level
from allreduce.comm.transports.hierarchical.transport import HierarchicalTransport
from allreduce.comm.transports.shared.opener import open_shared
from allreduce.comm.transports.tcp.opener import open_tcp
from allreduce.comm.transports.tcp.transport import TcpTransport
from allreduce.errors import AllreduceError, UsageError, reworded

_Opens = Callable[..., Sequence[LevelTransport]]


def open_hierarchical(
    world: World,
    local_members: int,
    *,
    name: str,
    timeout: float,
    between_hosts: Callable[[str], _Opens],
    hosts: Callable[[int], Hashable] | None = None,
) -> list[HierarchicalTransport]:
    """Open this process's members of a transport over all processes of the world.

    Args:
        between_hosts: Returns what opens the transport of a name as a level between hosts.
        hosts: Overrides the host of each member; for tests.

    Raises:
        UnsupportedError: Processes that seem to share a host cannot share memory.
        UsageError, JoinError, TimeoutError: As for tcp, and for mpi if it is used.
    """
    meeting = _meet(world, local_members, name, timeout, hosts)
    try:
        return _transports(meeting, between_hosts(meeting.across))
    except BaseException as error:
        for opened in meeting.opened:
            opened.abort(f"it could not be made: {type(error).__name__}")
        raise


def _transports(meeting: _Meeting, across: _Opens) -> list[HierarchicalTransport]:
    layout = meeting.layout
    controls = meeting.open(partial(open_tcp, kind=ControlChannel), range(layout.size), "all")
    levels: dict[int, dict[str, Level]] = {member: {} for member in controls}

    def add(level: str, members: Sequence[int], opens: _Opens, part: str) -> None:
        for member, transport in meeting.open(opens, members, part).items():
            levels[member][level] = Level(transport, tuple(members))
            known = controls[member].members
            transport.rename(tuple(known[number] for number in members))

    for members in layout.hosts:
        for part in _parts(layout, members):
            add(part, members, open_shared, part)
    if meeting.across != TcpTransport.name and len(layout.hosts) > 1:  # else the control serves
        add("every", range(layout.size), across, "every")
    for number in range(layout.lanes if len(layout.hosts) > 1 else 0):
        members = tuple(sorted(host[number] for host in layout.hosts))
        add("across", members, across, f"lane {number}")
    return [
        HierarchicalTransport(control, levels[member], layout, meeting.timeout)
        for member, control in controls.items()
    ]


def _parts(layout: Layout, members: Sequence[int]) -> tuple[str, ...]:
    """Return the names of a host's levels."""
    if len(layout.hosts) == 1:
        return ("in",)  # it carries entire calls
    return ("in", "out") if len(members) > 1 else ()


T = TypeVar("T", bound=LevelTransport)


@dataclass(frozen=True)
class _Meeting:
    """The facts for opening levels."""

    world: World
    owners: tuple[int, ...]  # each member's rank
    layout: Layout
    name: str
    timeout: float
    across: str  # the transport between hosts
    opened: list[LevelTransport] = field(default_factory=list)

    def open(
        self, opens: Callable[..., Sequence[T]], members: Sequence[int], part: str
    ) -> dict[int, T]:
        """Open this process's members of a level; all processes call it in the same order."""
        mine = [member for member in members if self.owners[member] == self.world.rank]
        if not mine:
            return {}
        name = f"{self.name}/{part}"
        world = self.world.subset(sorted({self.owners[member] for member in members}), name)
        try:
            made = opens(world, len(mine), name=name, timeout=self.timeout)
        except AllreduceError as error:  # its text begins with the level's transport
            where = f"[hierarchical] {self.world.called()}"
            raise reworded(error, f"{where}: its part {part!r} failed: {error}") from error
        self.opened.extend(made)
        return dict(zip(mine, made, strict=True))


def _meet(
    world: World,
    local_members: int,
    name: str,
    timeout: float,
    hosts: Callable[[int], Hashable] | None,
) -> _Meeting:
    key = f"{world.generation}/hierarchical/{name}"
    mine = json.dumps([local_members, settings.load().across]).encode()
    answers = [json.loads(text) for text in world.exchange(key, mine, timeout)]
    across = _agreed_across(world, answers)
    owners = tuple(rank for rank, (count, *_) in enumerate(answers) for _ in range(count))
    machines = [world.members[rank].machine for rank in owners]
    layout = Layout.of(machines if hosts is None else [hosts(m) for m in range(len(owners))])
    return _Meeting(world, owners, layout, name, timeout, across)


def _agreed_across(world: World, answers: Sequence[tuple[int, str]]) -> str:
    """Return the transport between hosts, after checking that all ranks want it."""
    where, (_, across) = f"[hierarchical] {world.called()}", answers[0]
    for rank, (_, other) in enumerate(answers):
        if other != across:
            raise UsageError(
                f"{where}: ALLREDUCE_ACROSS is {across} on {world.called(0)} but {other} on "
                f"{world.called(rank)}; set the same everywhere"
            )
    return across
