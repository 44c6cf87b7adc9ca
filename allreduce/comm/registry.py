"""The transports there are, and how the members of a world become members of a communicator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

from allreduce.cluster import World
from allreduce.comm.communicator import Communicator
from allreduce.comm.core import lifecycle, progress
from allreduce.comm.core.transport import Transport
from allreduce.comm.group_factory import GroupFactory, StorePart
from allreduce.devices import physical_devices
from allreduce.errors import unknown_name
from allreduce.importing import importing


class Opener(Protocol):
    """Opens this process's members of a transport; a collective call of the processes.

    Args:
        world: The processes.
        local_members: The number of members of this process, each for one thread.
        name: The communicator's name; the same on all ranks, and new in this world.
        timeout: Limit for meeting, and for any later wait, in seconds.
    """

    def __call__(
        self, world: World, local_members: int, *, name: str, timeout: float
    ) -> Sequence[Transport]: ...


class Row(NamedTuple):
    """One transport; its module is imported when it is first used.

    Attributes:
        module: The module of its openers.
        opener: The function that opens it.
        between_hosts: The function that opens it as a level between hosts, in `hierarchical`; "" if
            it is none.
        for_devices: Whether it carries arrays on devices, beside a transport of the host's.
        of_levels: Whether other transports carry its calls between hosts.
    """

    module: str
    opener: str
    between_hosts: str = ""
    for_devices: bool = False
    of_levels: bool = False

    def load(self, function: str) -> Callable[..., Sequence[Transport]]:
        """Import a function of its module."""
        with importing():
            imported = importlib.import_module(self.module)
        found: Callable[..., Sequence[Transport]] = getattr(imported, function)
        return found


REGISTRY: dict[str, Row] = {
    "shared": Row("allreduce.comm.transports.shared.opener", "open_shared"),
    "tcp": Row("allreduce.comm.transports.tcp.opener", "open_tcp", between_hosts="open_tcp"),
    "mpi": Row("allreduce.comm.transports.mpi.opener", "open_mpi", between_hosts="open_level"),
    "hierarchical": Row(
        "allreduce.comm.transports.hierarchical.opener", "open_hierarchical", of_levels=True
    ),
    "nccl": Row("allreduce.comm.transports.nccl.opener", "open_nccl", for_devices=True),
}


def opener(name: str | None, where: str = "") -> Opener:
    """Look a transport up; without a name it is the world's to choose.

    Args:
        name: The name of a transport.
        where: The argument or variable that names it, for the message.

    Raises:
        UsageError: There is none of this name; the message says which exist.
    """
    if name is None:
        return _by_world
    check_name(name, where)
    row = REGISTRY[name]
    found = row.load(row.opener)
    if row.for_devices:
        return cast(Opener, partial(found, control=_by_hosts))
    return cast(Opener, partial(found, between_hosts=_level_opener) if row.of_levels else found)


def _level_opener(name: str) -> Opener:
    """Look up what opens a transport as a level between hosts.

    Raises:
        UsageError: There is no such level; the message says which exist.
    """
    carriers = {each: row for each, row in REGISTRY.items() if row.between_hosts}
    if name not in carriers:
        raise unknown_name("transport between hosts", name, carriers, "ALLREDUCE_ACROSS")
    return cast(Opener, carriers[name].load(carriers[name].between_hosts))


def check_name(name: str, where: str = "") -> None:
    """Refuse an unknown transport; like `opener`, but without importing it."""
    if name not in REGISTRY:
        raise unknown_name("transport", name, REGISTRY, where)


def open_members(
    transport: str | None, world: World, local_members: int, *, name: str, timeout: float
) -> list[Communicator]:
    """Make this process's members of a communicator from which others can be made.

    Args:
        transport: As for `opener`; the other arguments are those of `Opener`.
    """
    opens = opener(transport, f"[comm] {world.called()}")
    part = StorePart(world, name, local_members)
    try:
        with progress.background_progress():
            transports = opens(part.world, local_members, name=name, timeout=timeout)
    except BaseException:
        part.world.close()
        raise
    made = []
    for opened in transports:
        lifecycle.add(opened)
        comm = _communicator(world, opened, name)
        made.append(comm)
        comm._dispatch.store = part.world.store
        group = partial(_open_group, transport)
        comm._groups = GroupFactory(world, part, comm._dispatch, timeout, group)
    return made


def _communicator(world: World, transport: Transport, name: str) -> Communicator:
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


def _open_group(
    parents: str | None, world: World, *, name: str, timeout: float, transport: str | None
) -> Communicator:
    return open_members(transport or parents, world, 1, name=name, timeout=timeout)[0]


def _by_world(
    world: World, local_members: int, *, name: str, timeout: float
) -> Sequence[Transport]:
    """Open what suits where the ranks are, and the devices of this one."""
    chosen = opener("nccl") if physical_devices("GPU") else _by_hosts
    return chosen(world, local_members, name=name, timeout=timeout)


def _by_hosts(
    world: World, local_members: int, *, name: str, timeout: float
) -> Sequence[Transport]:
    """Open `shared` on one host and `hierarchical` on several."""
    chosen = "shared" if len(world.hosts) == 1 else "hierarchical"
    return opener(chosen)(world, local_members, name=name, timeout=timeout)
