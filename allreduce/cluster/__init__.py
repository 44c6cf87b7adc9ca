"""Find the world of a process: from arguments, `ALLREDUCE_…` variables, MPI, Slurm, or alone.

`join()` asks the resolvers in the order of precedence (docs/cluster.md); the first that claims the
process wins. `World.why`, logged once by rank 0, also names the claims of the others.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

from allreduce import settings
from allreduce.cluster.host import launchers, process_ancestry
from allreduce.cluster.process.exit_hooks import failure
from allreduce.cluster.resolvers.resolver import Request, Resolver
from allreduce.cluster.resolvers.tasks import at_task
from allreduce.cluster.spec import ClusterSpec
from allreduce.cluster.store import SilentError, Store
from allreduce.cluster.world import LeaderLeftError, Member, World
from allreduce.errors import AllreduceError, InternalError, UsageError
from allreduce.events import configure_logging, logger

__all__ = [
    "PRECEDENCE",
    "ClusterSpec",
    "LeaderLeftError",
    "Member",
    "SilentError",
    "Store",
    "World",
    "failure",
    "join",
]

# Module and class of each resolver; the order is the precedence.
PRECEDENCE: tuple[tuple[str, str], ...] = (
    ("allreduce.cluster.resolvers.explicit", "Explicit"),
    ("allreduce.cluster.resolvers.torchrun", "Torchrun"),
    ("allreduce.cluster.resolvers.mpi", "Mpi"),
    ("allreduce.cluster.resolvers.slurm", "Slurm"),
    ("allreduce.cluster.resolvers.tasks", "Tasks"),
    ("allreduce.cluster.resolvers.single", "Single"),
)

_joining = threading.Lock()
# The number of this process's next world: equal on all ranks, because they join together. After a
# failed join, the next attempt has the same number.
_generation = 1


def _renew() -> None:
    """In a child made by fork: another thread of the parent may have been joining."""
    global _joining
    _joining = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def join(
    *,
    rank: int | None = None,
    size: int | None = None,
    leader: str | None = None,
    secret: str | bytes | None = None,
    timeout: float | None = None,
) -> World:
    """Join the job that the arguments, the environment or a scheduler say this process belongs to.

    Blocks until all ranks have joined. Every argument is also read from `ALLREDUCE_<NAME>`.

    Args:
        rank: This process's rank.
        size: How many ranks the job has.
        leader: `host:port` of the group leader.
        secret: The job secret, equal on all ranks; needed unless the leader is on the loopback
            interface.
        timeout: Seconds to wait for the other ranks, and longest silence of a member.

    Raises:
        JoinError: The job cannot be joined: no leader, a refusal, an MPI that does not fit.
        TimeoutError: Some ranks did not come; the message names them.
        UsageError: Arguments and variables are invalid or contradict each other, or this process
            has joined already.
        UnsupportedError: The job spans hosts in a way that nothing here carries.
    """
    global _generation
    with _joining:
        process_ancestry.check(os.environ)
        read = settings.load()
        named = {"rank": rank, "size": size, "leader": leader, "secret": secret, "timeout": timeout}
        request = _request(read, named)
        place = launchers.rank_of_several(os.environ) if request.rank is None else request.rank
        if place is not None:  # for reports of long waits
            configure_logging(place, read.log_level)
        world = _resolve(request)
        _generation += 1
    _introduce(world, read)
    return world


def _introduce(world: World, read: settings.Settings) -> None:
    """Log with the rank from now on, and first the world itself."""
    configure_logging(world.rank, read.log_level)
    if world.rank == 0:
        logger.info("%s", world.why)
    if _warns(world, read):
        for warning in read.unknown:
            logger.warning("%s", warning)


def _warns(world: World, read: settings.Settings) -> bool:
    """Return whether this rank logs its variables: one per host if a launcher started the ranks."""
    own = world.source == "leader" and read.launched is None  # one that somebody started by hand
    return own or world.local_rank == 0


def _request(read: settings.Settings, named: dict[str, Any]) -> Request:
    """Merge the arguments with the environment's variables."""
    if named["leader"] is not None:
        named["leader"] = settings.check("LEADER", named["leader"])
    if isinstance(named["secret"], str):
        named["secret"] = named["secret"].encode()
    request = Request.merge(read, os.environ, _generation, **named)
    if request.leader is not None and request.leader.startswith("/job:"):
        request = at_task(request, request.leader)
    if not request.timeout > 0:
        raise UsageError(
            f"[cluster] timeout={request.timeout!r} is not valid: expected seconds above 0"
        )
    return request


def _resolve(request: Request) -> World:
    resolvers = [_load(module, name) for module, name in PRECEDENCE]
    for position, resolver in enumerate(resolvers):
        if resolver.claim(request) is not None:
            losers = [loser for loser in resolvers[position + 1 : -1] if _wants(loser, request)]
            ignored = ", ".join(f"{loser.name} ({_wants(loser, request)})" for loser in losers)
            return resolver.join(request, f"; ignored: {ignored}" if ignored else "")
    raise InternalError("[cluster] no resolver claims this process, not even the last")


def _wants(loser: Resolver, request: Request) -> str | None:
    """Describe the claim of a source that lost; its errors no longer matter."""
    try:
        return loser.claim(request)
    except AllreduceError as error:
        return str(error).removeprefix("[cluster] ")


def _load(module: str, name: str) -> Resolver:
    found = getattr(importlib.import_module(module), name)()
    assert isinstance(found, Resolver)
    return found
