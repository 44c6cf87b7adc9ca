"""Join the workers of a cluster that `ALLREDUCE_CLUSTER` or `TF_CONFIG` describes."""

from __future__ import annotations

from dataclasses import replace

from allreduce.cluster.resolvers.explicit import join_leader
from allreduce.cluster.resolvers.resolver import Request, Resolver
from allreduce.cluster.spec import collective_tasks, own_task, parse_task
from allreduce.cluster.world import World
from allreduce.errors import UsageError


class Tasks(Resolver):
    """Claims chief and workers of a cluster; the first of them hosts the group leader."""

    name = "tasks"

    def claim(self, request: Request) -> str | None:
        found = own_task(request.environ)
        if found is None or found[1:] not in collective_tasks(found[0]):
            return None
        return f"the cluster's description says task {found[1]}:{found[2]}"

    def join(self, request: Request, ignored: str) -> World:
        return join_leader(at_task(request), self.name, self.claim(request) or "", ignored)


def at_task(request: Request, leader: str | None = None) -> Request:
    """Return a request with rank, size and leader of the cluster that the environment describes.

    Args:
        request: What else is asked for.
        leader: The task that hosts the group leader; by default the first.

    Raises:
        UsageError: No cluster is described, or this task is neither chief nor worker.
    """
    found = own_task(request.environ)
    if found is None:
        raise UsageError(
            f"[cluster] the leader {leader} is a task, but no cluster is described; set "
            "ALLREDUCE_CLUSTER and ALLREDUCE_TASK, or TF_CONFIG"
        )
    spec, own = found[0], found[1:]
    members = collective_tasks(spec)
    if own not in members:
        raise UsageError(
            f"[cluster] task {own[0]}:{own[1]} makes no collective calls; chief and workers do"
        )
    chosen = members[0] if leader is None else parse_task(leader)
    rank, size = members.index(own), len(members)
    return replace(request, rank=rank, size=size, leader=spec.address(*chosen))
