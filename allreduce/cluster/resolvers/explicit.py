"""Join with explicit rank, size and leader, from arguments or `ALLREDUCE_…` variables."""

from __future__ import annotations

from allreduce.cluster.host import limits
from allreduce.cluster.host.address import split
from allreduce.cluster.process.exit_hooks import Watch
from allreduce.cluster.resolvers.resolver import Request, Resolver, explain
from allreduce.cluster.resolvers.single import world_of_one
from allreduce.cluster.world import World
from allreduce.errors import JoinError, UsageError
from allreduce.importing import importing


class Explicit(Resolver):
    """Claims a process if any of rank, size and leader is given; then all must be."""

    name = "leader"

    def claim(self, request: Request) -> str | None:
        if not request.named:
            return None
        return f"{', '.join(request.named)} {'say' if len(request.named) > 1 else 'says'} so"

    def join(self, request: Request, ignored: str) -> World:
        return join_leader(request, self.name, self.claim(request) or "", ignored)


def join_leader(request: Request, source: str, evidence: str, ignored: str) -> World:
    """Join with the request's rank, size and leader, which the resolver `source` has found."""
    rank, size = _checked(request)
    if size == 1:
        return world_of_one(request, source, evidence, ignored)
    assert request.leader is not None  # _checked
    meeting_place = f"group leader {request.leader}"
    why = explain(size, source, f"{evidence} ({meeting_place})", ignored)
    world = _meet(request, rank, size, request.leader, why, source)
    return Watch(world.rank, launched=request.launched).watch(world)


def _checked(request: Request) -> tuple[int, int]:
    """Return rank and size."""
    rank, size = request.rank, request.size
    given = ", ".join(request.named)
    needed = {"rank": rank, "size": size} | ({"leader": request.leader} if size != 1 else {})
    missing = [name for name, value in needed.items() if value is None]
    if rank is None or size is None or missing:
        raise UsageError(
            f"[cluster] {given} came without {' and '.join(missing)}; give rank, size and leader "
            "(arguments, or ALLREDUCE_RANK, ALLREDUCE_SIZE and ALLREDUCE_LEADER), or none of them"
        )
    if not 0 <= rank < size:
        raise UsageError(
            f"[cluster] rank {rank} is out of range for size {size} (from {given}): expected 0 to "
            f"{size - 1}"
        )
    if request.leader is not None:
        split(request.leader)
    return rank, size


def _meet(request: Request, rank: int, size: int, address: str, why: str, source: str) -> World:
    with importing():
        from allreduce.cluster.leader.meeting import PATIENCE, Meeting

    secret, hosted, deaf = request.secret or b"", None, ""
    if rank == 0 and not request.launched:
        from allreduce.cluster.leader.service import Leader

        wanted = "[cluster] rank 0: cannot host the group leader"
        limits.check_files(limits.leader_files(size), wanted)
        try:
            hosted = Leader(address, size, secret, request.timeout, request.generation)
        except JoinError as error:  # the address is in use, or another machine's
            deaf = str(error).removeprefix("[cluster] ")
    return Meeting(
        rank=rank,
        size=size,
        addresses=(address,),
        secret=secret,
        generation=request.generation,
        timeout=request.timeout,
        source=source,
        why=why,
        whereabouts="the launcher" if request.launched else "rank 0's process",
        patience=PATIENCE,
        hosted=hosted,
        deaf=deaf,
    ).join()
