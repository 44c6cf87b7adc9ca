"""Join the ranks that `torchrun` has started."""

from __future__ import annotations

from dataclasses import replace

from allreduce.cluster.host.address import LOOPBACK, joined
from allreduce.cluster.resolvers.explicit import join_leader
from allreduce.cluster.resolvers.resolver import Request, Resolver
from allreduce.cluster.world import World
from allreduce.errors import JoinError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Torchrun(Resolver):
    """Claims ranks of torchrun; rank 0 hosts the group leader at the port after torchrun's."""

    name = "torchrun"

    def claim(self, request: Request) -> str | None:
        environ = request.environ
        if "TORCHELASTIC_RUN_ID" not in environ or not all(v in environ for v in _VARIABLES):
            return None
        return f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} say so"

    def join(self, request: Request, ignored: str) -> World:
        environ = request.environ
        rank, size, port = (environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise JoinError(
                f"[cluster] torchrun has set RANK={rank!r} and WORLD_SIZE={size!r}; expected a "
                "rank below a size"
            )
        on_one_host = environ.get("LOCAL_WORLD_SIZE") == size
        host = LOOPBACK if on_one_host else environ["MASTER_ADDR"]
        # torchrun's own store listens at MASTER_PORT.
        place = joined(host, int(port) + 1)
        placed = replace(request, rank=int(rank), size=int(size), leader=place)
        return join_leader(placed, self.name, self.claim(request) or "", ignored)
