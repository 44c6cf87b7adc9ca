"""Join the tasks of an `srun` step: through MPI if the step offers its PMI, else through a leader.

Without MPI, all tasks compute the leader's address. Task 0 runs on the step's first host; Slurm
gives its name to every task. The port is one of a few derived from the step's number; any other
program that listens there fails the handshake.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from allreduce.cluster.host.address import LOOPBACK, joined
from allreduce.cluster.host.interfaces import any_source_address
from allreduce.cluster.host.launchers import in_step, step_size
from allreduce.cluster.mpi import library
from allreduce.cluster.mpi.arrival_tracker import ArrivalTracker, LaunchedRank
from allreduce.cluster.process.exit_hooks import Watch
from allreduce.cluster.resolvers.resolver import Request, Resolver, explain
from allreduce.cluster.resolvers.single import world_of_one
from allreduce.cluster.world import World
from allreduce.errors import JoinError, UsageError
from allreduce.importing import importing

if TYPE_CHECKING:  # gRPC is imported when a leader is needed
    from allreduce.cluster.leader.service import Leader

_PORTS = 4  # that a leader may listen on
_LOWEST, _HIGHEST = 20000, 32767  # from 32768 on, Linux assigns ports to outgoing connections


class Step(NamedTuple):
    """One task's view of its step."""

    job: str
    step: str
    rank: int
    size: int
    nodes: int
    node: int  # the index of this task's node
    hosts: str  # in Slurm's notation: node[01-03]

    def __str__(self) -> str:
        return f"SLURM_PROCID={self.rank} of the {self.size} tasks of step {self.job}.{self.step}"


def step(environ: Mapping[str, str]) -> Step | None:
    """Read which step this process belongs to; None outside `srun`.

    Raises:
        JoinError: The variables name a step, but no valid rank and size.
    """
    if not in_step(environ):
        return None
    job, number = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    size = step_size(environ)
    rank = environ.get("SLURM_PROCID", "")
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    node = environ.get("SLURM_NODEID", "0")
    valid = all(text.isdecimal() for text in (size, rank, nodes, node))
    if not valid or int(rank) >= int(size):
        raise JoinError(
            f"[cluster] Slurm's step {job}.{number} has SLURM_PROCID={rank!r} and "
            f"SLURM_STEP_NUM_TASKS={size!r}: expected a rank below a size; start the script with "
            "srun, or remove SLURM_STEP_ID from its environment"
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "unknown hosts")
    return Step(job, number, int(rank), int(size), int(nodes), int(node), hosts)


class Slurm(Resolver):
    """Claims the tasks of an `srun` step; batch scripts and `salloc` shells are worlds of one."""

    name = "slurm"

    def claim(self, request: Request) -> str | None:
        found = step(request.environ)
        return str(found) if found is not None else None

    def join(self, request: Request, ignored: str) -> World:
        found = step(request.environ)
        assert found is not None  # claim() returned it
        if found.size == 1:
            return world_of_one(request, self.name, str(found), ignored)
        return _join_mpi(request, found, ignored) or _meet(request, found, ignored)


def _join_mpi(request: Request, found: Step, ignored: str) -> World | None:
    """Join through MPI if its world is the step; None if not."""
    environ = request.environ
    speaks_pmi = "PMI_RANK" in environ or "PMIX_RANK" in environ
    if not speaks_pmi or find_spec("mpi4py") is None:
        return None
    pmix = "Open MPI" if "PMI_RANK" not in environ else "Slurm"  # for PMIx
    launched = LaunchedRank(found.rank, found.size, "SLURM_PROCID", f"{found.job}.{found.step}")
    with ArrivalTracker(launched) as arrivals:
        try:
            mpi = library.load(pmix, arrivals, request.timeout)
        except JoinError:
            return None  # join through a leader instead
        if mpi.COMM_WORLD.Get_size() != found.size:
            return None
        from allreduce.cluster.resolvers.mpi import join_through

        evidence = f"{found}, and MPI has the same ranks"
        return join_through(mpi, arrivals, request, evidence, ignored)


def _meet(request: Request, found: Step, ignored: str) -> World:
    """Join through a leader that task 0 starts; the others find it by the step's name or hosts."""
    with importing():
        from allreduce.cluster.leader.meeting import PATIENCE, Meeting
        from allreduce.cluster.resolvers.rendezvous import Publisher

    _check_secret(request, found)
    name = f"allreduce/{os.getuid()}/slurm/{found.job}.{found.step}/{request.generation}"
    with contextlib.ExitStack() as shown:
        hosted = None
        if found.rank == 0:
            secret = request.secret or secrets.token_hex(32).encode()
            hosted = _host(request, found, secret)
            addresses: tuple[str, ...] = (hosted.address,)
            patience = PATIENCE
            try:
                publisher = Publisher(name, f"{hosted.address} {secret.hex()}".encode())
            except BaseException:
                hosted.close()
                raise
            shown.callback(publisher.close)
        else:
            addresses, secret, patience = _look(request, found, name)
        world = Meeting(
            rank=found.rank,
            size=found.size,
            addresses=addresses,
            secret=secret,
            generation=request.generation,
            timeout=request.timeout,
            source=Slurm.name,
            why=explain(found.size, Slurm.name, str(found), ignored),
            whereabouts="the step's task 0",
            hosted=hosted,
            patience=patience,
        ).join()
    return Watch(found.rank).watch(world)


def _look(request: Request, found: Step, name: str) -> tuple[tuple[str, ...], bytes, float]:
    """Return the possible addresses of task 0's leader, the secret, and how long to try."""
    from allreduce.cluster.leader.meeting import PATIENCE
    from allreduce.cluster.resolvers.rendezvous import fetch

    if found.node == 0:  # task 0's host
        owner = f"task 0 of step {found.job}.{found.step}"
        text = fetch(name, request.timeout, f"rank {found.rank}", owner).decode()
        address, _, hexed = text.partition(" ")
        return (address,), bytes.fromhex(hexed), PATIENCE
    first = expand(found.hosts)[0]
    addresses = tuple(joined(first, port) for port in _ports(request, found))
    return addresses, request.secret or b"", request.timeout


def _check_secret(request: Request, found: Step) -> None:
    if found.nodes > 1 and not request.secret:
        raise UsageError(
            f"[cluster] rank {found.rank}: Slurm's step {found.job}.{found.step} spans "
            f"{found.nodes} hosts ({found.hosts}), and without MPI the tasks have no way to agree "
            "on a secret: set ALLREDUCE_SECRET to the same random text on all of them "
            "(ALLREDUCE_SECRET=$(openssl rand -hex 32) srun ...), or install mpi4py for this "
            "Slurm's MPI"
        )


def _host(request: Request, found: Step, secret: bytes) -> Leader:
    """Start the leader at an address that the step's other tasks try."""
    from allreduce.cluster.leader.service import Leader

    host, numbers = LOOPBACK, [0]
    if found.nodes > 1:
        host, numbers = listening_address(found.hosts), _ports(request, found)
    for number in numbers[:-1]:
        with contextlib.suppress(JoinError):  # in use, by chance or by another step
            address = joined(host, number)
            return Leader(address, found.size, secret, request.timeout, request.generation)
    address = joined(host, numbers[-1])
    return Leader(address, found.size, secret, request.timeout, request.generation)


def _ports(request: Request, found: Step) -> list[int]:
    return ports(f"{os.getuid()}/{found.job}.{found.step}", request.generation)


def expand(nodelist: str) -> list[str]:
    """List the hosts of a Slurm node list such as `gpu[08-10,12],login`."""
    found = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", part)  # text and bracketed ranges alternate
        choices = [[text] if i % 2 == 0 else _numbers(text) for i, text in enumerate(pieces)]
        found += ["".join(words) for words in itertools.product(*choices)]
    return found


def _numbers(listed: str) -> list[str]:
    """Expand `08-10,12`, keeping leading zeros."""
    found = []
    for one in listed.split(","):
        low, _, high = one.partition("-")
        last = high or low
        found += [str(number).zfill(len(low)) for number in range(int(low), int(last) + 1)]
    return found


def ports(step: str, generation: int) -> list[int]:
    """Return the ports to try for a step's leader, in order."""
    drawn = (hashlib.sha256(f"{step}/{generation}/{i}".encode()).digest() for i in range(_PORTS))
    return [_LOWEST + int.from_bytes(one[:4], "big") % (_HIGHEST - _LOWEST) for one in drawn]


def listening_address(nodelist: str) -> str:
    """Choose the address of task 0's leader: one that the step's other hosts can reach.

    Raises:
        JoinError: No local address leads to them.
    """
    others = expand(nodelist)[1:]
    local = any_source_address(others)
    if local is None:
        raise JoinError(
            f"[cluster] rank 0: no local address leads to {', '.join(others[:3])}; "
            "check that the step's hosts can resolve each other's names"
        )
    return local
