"""Join the ranks that `torchrun` or a launcher like it has started."""

from __future__ import annotations

from dataclasses import replace

from allreduce.cluster.host.address import LOOPBACK, joined
from allreduce.cluster.host.launchers import rank_of_several
from allreduce.cluster.resolvers.explicit import join_leader
from allreduce.cluster.resolvers.resolver import Request, Resolver
from allreduce.cluster.world import World
from allreduce.errors import JoinError, UsageError

_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_MOST_PORT = 65535


class Torchrun(Resolver):
    """Claims ranks of torchrun; rank 0 hosts the group leader at the port after torchrun's.

    RANK and WORLD_SIZE are too common names to decide by: there must be LOCAL_RANK or a variable of
    torchrun's agent, and no MPI launcher or Slurm step that gave this process another rank.
    """

    name = "torchrun"

    def claim(self, request: Request) -> str | None:
        environ = request.environ
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        by_agent = any(name.startswith("TORCHELASTIC_") for name in environ)
        if not by_agent and ("LOCAL_RANK" not in environ or rank_of_several(environ) is not None):
            return None
        if environ["WORLD_SIZE"] == "1" and not all(name in environ for name in _MEETING):
            return None
        return f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} say so"

    def join(self, request: Request, ignored: str) -> World:
        environ = request.environ
        rank, size = environ["RANK"], environ["WORLD_SIZE"]
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise JoinError(
                f"[cluster] torchrun has set RANK={rank!r} and WORLD_SIZE={size!r}; expected a "
                "rank below a size"
            )
        missing = [name for name in _MEETING if name not in environ]
        if missing:
            raise JoinError(
                f"[cluster] RANK={rank!r} and WORLD_SIZE={size!r} come without "
                f"{' and '.join(missing)}, where the ranks meet; start the script with torchrun, "
                f"mpirun or python -m allreduce.run -n {size}, or remove these variables from its "
                "environment"
            )
        port = environ["MASTER_PORT"]
        if not (port.isdecimal() and 0 < int(port) < _MOST_PORT):
            raise UsageError(
                f"[cluster] torchrun has set MASTER_PORT={port!r}; expected a number from 1 to "
                f"{_MOST_PORT - 1}, as the ranks meet at the port after it"
            )
        on_one_host = environ.get("LOCAL_WORLD_SIZE") == size
        host = LOOPBACK if on_one_host else environ["MASTER_ADDR"]
        # torchrun's own store listens at MASTER_PORT.
        place = joined(host, int(port) + 1)
        placed = replace(request, rank=int(rank), size=int(size), leader=place)
        return join_leader(placed, self.name, self.claim(request) or "", ignored)
