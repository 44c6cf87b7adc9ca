"""Worlds that an `srun` step makes: through MPI where the step speaks its PMI, else a leader."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from allreduce.cluster.host.address import LOOPBACK, joined
from allreduce.cluster.host.launchers import check_one, in_step, step_size
from allreduce.cluster.mpi import library
from allreduce.cluster.mpi.arrival_tracker import Attendance, Seat
from allreduce.cluster.process.exit_hooks import Watch
from allreduce.cluster.resolvers.resolver import Request, Resolver, explain
from allreduce.cluster.resolvers.single import world_of_one
from allreduce.cluster.resolvers.slurm_hosts import expand, listening_address, ports
from allreduce.cluster.world import World
from allreduce.errors import JoinError, UsageError
from allreduce.importing import importing

if TYPE_CHECKING:  # gRPC is imported when a leader is needed
    from allreduce.cluster.leader.service import Leader


class Step(NamedTuple):
    """One task's view of its step."""

    job: str
    step: str
    rank: int
    size: int
    nodes: int
    node: int  # the position of this task's among them
    hosts: str  # as Slurm writes them: node[01-03]

    def __str__(self) -> str:
        return f"SLURM_PROCID={self.rank} of the {self.size} tasks of step {self.job}.{self.step}"


def step(environ: Mapping[str, str]) -> Step | None:
    """Read the step this process is a task of; None outside of `srun`.

    Raises:
        JoinError: It is a step's task, but the variables do not say which of how many.
    """
    if not in_step(environ):
        return None
    job, number = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    size = step_size(environ)
    rank = environ.get("SLURM_PROCID", "")
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    node = environ.get("SLURM_NODEID", "0")
    told = all(text.isdecimal() for text in (size, rank, nodes, node))
    if not told or int(rank) >= int(size):
        raise JoinError(
            f"[cluster] Slurm's step {job}.{number} has SLURM_PROCID={rank!r} and "
            f"SLURM_STEP_NUM_TASKS={size!r}: expected a rank below a size; start the script with "
            "srun, or remove SLURM_STEP_ID from its environment"
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "unknown hosts")
    return Step(job, number, int(rank), int(size), int(nodes), int(node), hosts)


class Slurm(Resolver):
    """Claims the tasks of an `srun` step; batch scripts and `salloc` shells are alone."""

    name = "slurm"

    def claim(self, request: Request) -> str | None:
        found = step(request.environ)
        return str(found) if found is not None else None

    def join(self, request: Request, ignored: str) -> World:
        found = step(request.environ)
        assert found is not None  # it has claimed the process
        if found.size == 1:
            check_one(request.environ)
            return world_of_one(request, self.name, str(found), ignored)
        return _join_mpi(request, found, ignored) or _meet(request, found, ignored)


def _join_mpi(request: Request, found: Step, ignored: str) -> World | None:
    """Join through an MPI whose world is the step, if there is one."""
    environ = request.environ
    speaks_pmi = "PMI_RANK" in environ or "PMIX_RANK" in environ
    if not speaks_pmi or find_spec("mpi4py") is None:
        return None
    pmix = "Open MPI" if "PMI_RANK" not in environ else "Slurm"  # only PMIx needs a PMIx library
    seat = Seat(found.rank, found.size, "SLURM_PROCID", f"{found.job}.{found.step}")
    with Attendance(seat, "join") as attendance:
        try:
            mpi = library.load(pmix, attendance, request.timeout)
        except JoinError:
            return None  # the leader serves in its place
        if mpi.COMM_WORLD.Get_size() != found.size:
            return None
        from allreduce.cluster.resolvers.mpi import join_through

        evidence = f"{found}, and MPI has the same ranks"
        return join_through(mpi, attendance, request, evidence, ignored)


def _meet(request: Request, found: Step, ignored: str) -> World:
    """Meet at a leader that task 0 starts; the others find it by the step's name or hosts."""
    with importing():
        from allreduce.cluster.leader.meeting import PATIENCE, Meeting
        from allreduce.cluster.resolvers.rendezvous import Beacon

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
                beacon = Beacon(name, f"{hosted.address} {secret.hex()}".encode())
            except BaseException:
                hosted.close()
                raise
            shown.callback(beacon.close)
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
    return Watch(found.rank).over(world)


def _look(request: Request, found: Step, name: str) -> tuple[tuple[str, ...], bytes, float]:
    """Return where task 0's leader may be, the secret, and for how long to try."""
    from allreduce.cluster.leader.meeting import PATIENCE
    from allreduce.cluster.resolvers.rendezvous import fetch

    if found.node == 0:  # its host
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
    """Start the leader where the step's other tasks look for it."""
    from allreduce.cluster.leader.service import Leader

    host, numbers = LOOPBACK, [0]
    if found.nodes > 1:
        host, numbers = listening_address(found.hosts), _ports(request, found)
    for number in numbers[:-1]:
        with contextlib.suppress(JoinError):  # taken: by chance, or by another step
            address = joined(host, number)
            return Leader(address, found.size, secret, request.timeout, request.generation)
    address = joined(host, numbers[-1])
    return Leader(address, found.size, secret, request.timeout, request.generation)


def _ports(request: Request, found: Step) -> list[int]:
    return ports(f"{os.getuid()}/{found.job}.{found.step}", request.generation)
