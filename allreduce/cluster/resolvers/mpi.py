"""Worlds that MPI knows: ranks from its launcher and library, the store from a leader on rank 0."""

from __future__ import annotations

import json
import os
import secrets
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from allreduce.cluster.host.address import joined
from allreduce.cluster.host.interfaces import Interface, interfaces, leaders_address
from allreduce.cluster.host.launchers import Launcher, launcher
from allreduce.cluster.host.machine import identity
from allreduce.cluster.host.waiting import Wait
from allreduce.cluster.mpi import library, pmi
from allreduce.cluster.mpi.arrival_tracker import REMEDY, ArrivalTracker
from allreduce.cluster.process.exit_hooks import INTERRUPTED, Watch
from allreduce.cluster.resolvers.resolver import Request, Resolver, explain
from allreduce.cluster.resolvers.single import world_of_one
from allreduce.cluster.world import World
from allreduce.errors import AllreduceError, JoinError, TimeoutError
from allreduce.importing import importing

if TYPE_CHECKING:  # gRPC is imported when a leader is needed
    from allreduce.cluster.leader.service import Leader

# Ranks may share a core while they start: 32 ranks that poll every 2 ms take an eighth of two cores
# from late ones. So the pause grows with the wait. It starts short: a barrier of 32 takes five
# rounds, and all ranks poll in each of them (0.2 s with pauses that double).
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.032
_POLLS = 8  # the next pause, as a part of the time waited

_joining: Watch | None = None  # while this process joins, and when that has failed


def _begin(watch: Watch) -> None:
    """Watch this process while it joins, in place of an earlier step's or attempt's watch."""
    global _joining
    if _joining is not None:
        _joining.end()
    _joining = watch


class _Wait:
    """A wait for all MPI ranks to join."""

    def __init__(self, timeout: float, arrivals: ArrivalTracker) -> None:
        self.timeout, self._arrivals = timeout, arrivals
        self._wait = Wait(timeout)

    def late(self) -> str:
        return self._arrivals.late() or "some of the MPI ranks"

    def has_time_left(self) -> bool:
        """Return whether there is time left; reports the wait when it has become long."""
        if self._wait.quiet:
            return True
        return self._wait.has_time_left(f"{self.late()}; {REMEDY}")


class Mpi(Resolver):
    """Claims a process that `mpirun` or `mpiexec` started."""

    name = "mpi"

    def claim(self, request: Request) -> str | None:
        found = launcher(request.environ)
        return str(found) if found is not None else None

    def join(self, request: Request, ignored: str) -> World:
        found = launcher(request.environ)
        assert found is not None  # it has claimed the process
        if found.size == 1:
            return world_of_one(request, self.name, str(found), ignored)
        if find_spec("mpi4py") is None:
            raise JoinError(
                f"[cluster] rank {found.rank}: {library.launcher_path(found.family)} started "
                f"this process as one of {found.size} ranks, but mpi4py is not installed: "
                'pip install "allreduce[mpich]" (which brings an MPI) or "allreduce[mpi]" (for '
                "the MPI of this machine)"
            )
        if pmi.has_lost_connection():
            raise JoinError(
                f"[cluster] process {os.getpid()} has inherited the variables of rank {found.rank} "
                "of a job, but not its connection to the launcher: a rank's children cannot take "
                "its place; do not call allreduce.init() in workers and helpers"
            )
        if pmi.connected():
            _begin(Watch(found.rank, abort=_abort_unjoined, job=str(pmi.proxy())))
        with ArrivalTracker(library.launched(found)) as arrivals:
            return self._join(request, found, arrivals, ignored)

    def _join(
        self, request: Request, found: Launcher, arrivals: ArrivalTracker, ignored: str
    ) -> World:
        mpi = library.load(found.family, arrivals, request.timeout)
        if mpi.COMM_WORLD.Get_size() != found.size:
            raise library.mismatch(
                found.family,
                found.rank,
                f"the launcher says {found.size} ranks, the library {mpi.COMM_WORLD.Get_size()} "
                f"({found})",
            )
        version = " ".join(mpi.Get_library_version().split("\n")[0].split(",")[0].split())
        evidence = f"{found}; the library is {version}"
        return join_through(mpi, arrivals, request, evidence, ignored)


def join_through(
    mpi: Any, arrivals: ArrivalTracker, request: Request, evidence: str, ignored: str
) -> World:
    """Join all ranks of `mpi.COMM_WORLD`, which is initialised."""
    comm = mpi.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    global _joining
    watch = Watch(rank, abort=partial(_abort, comm), abort_at_exit=_abort_at_exit)
    _begin(watch)  # uncaught, an error has to end the job
    hosted: Leader | None = None
    invitation = ""
    try:
        wait = _Wait(request.timeout, arrivals)
        places = _gather_places(mpi, comm, wait)
        # All ranks have initialised MPI, and so mapped these files: after a SIGKILL no process
        # would remove them.
        library.unlink_segments(library.MAPPED_BY_ALL)
        if rank == 0:
            secret = request.secret or secrets.token_hex(32).encode()
            invitation, hosted = _host(request, places, secret)
        with importing():  # gRPC: by all ranks, while rank 0 starts the leader
            import_module("allreduce.cluster.leader.meeting")
        share = _share(comm, invitation, wait)
        why = explain(size, Mpi.name, evidence, ignored)
        world = watch.watch(_meet(comm, request, share, why, hosted))
        # When rank 0 continues, the leader in it has answered all ranks: a script that finalises
        # MPI at once would otherwise hold the GIL until all have done so. Polled, because MPI's own
        # wait keeps a core busy that late ranks need.
        _complete(comm, comm.Ibarrier(), wait)
    except BaseException:
        if hosted is not None:
            hosted.close()
        raise
    _joining = None
    return world


def _meet(comm: Any, request: Request, share: tuple[str, str], why: str, hosted: Any) -> World:
    """Join at rank 0's leader; `share` is its address and the secret."""
    from allreduce.cluster.leader.meeting import PATIENCE, Meeting

    address, hexed = share
    meeting = Meeting(
        rank=comm.Get_rank(),
        size=comm.Get_size(),
        addresses=(address,),
        secret=bytes.fromhex(hexed),
        generation=request.generation,
        timeout=request.timeout,
        source=Mpi.name,
        why=why,
        whereabouts="rank 0's process",
        patience=PATIENCE,
        hosted=hosted,
    )
    return meeting.join()


def _abort(comm: Any, code: int) -> None:
    if library.finalized():  # then nothing waits for this rank in MPI, and leaving is enough
        return
    library.unlink_segments()
    if code == INTERRUPTED:  # every rank has the signal: Abort would report it once for each
        if pmi.connected():
            pmi.abort(code)
            time.sleep(pmi.KILL_SECONDS)
        os._exit(code)
    comm.Abort(code)


def _abort_at_exit(sign: int, others: list[str], seconds: float) -> bool:
    from allreduce import _native  # loaded late, as ranks without MPI do not need it yet

    names = [f"allreduce.{name}" for name in others]
    if library.finalized() or not _native.abort_at_exit(sign, names, seconds):
        return False  # MPI has ended, mpi4py ends it, or the launcher is not hydra
    library.unlink_segments()
    return True


def _abort_unjoined(code: int) -> None:
    if library.finalized() or not pmi.connected():  # the line may be somebody else's by now
        return
    # A library that does not recognise the launcher has made separate files on each rank.
    library.unlink_segments(processes=pmi.siblings())
    pmi.abort(code)


def _gather_places(mpi: Any, comm: Any, wait: _Wait) -> list[Any]:
    """Return every rank's host identity and interfaces, by rank; a collective call."""
    mine = json.dumps([identity(), interfaces()]).encode()
    lengths = bytearray(8 * comm.Get_size())
    _complete(comm, comm.Iallgather(len(mine).to_bytes(8, "big"), lengths), wait)
    counts = [int.from_bytes(lengths[at : at + 8], "big") for at in range(0, len(lengths), 8)]
    ends = list(accumulate(counts))
    gathered = bytearray(ends[-1])
    starts = [0, *ends[:-1]]
    into = [gathered, counts, starts, mpi.BYTE]
    _complete(comm, comm.Iallgatherv([mine, mpi.BYTE], into), wait)
    return [json.loads(gathered[start:end]) for start, end in zip(starts, ends, strict=True)]


def _host(request: Request, places: list[Any], secret: bytes) -> tuple[str, Any]:
    """Start the leader on a free port; return the text for the others, also after a failure."""
    with importing():
        from allreduce.cluster.leader.service import Leader

    machines = [machine for machine, _ in places]
    hosts = [[Interface(*one) for one in listed] for _, listed in places]
    try:
        address = joined(leaders_address(machines, hosts), 0)
        leader = Leader(address, len(places), secret, request.timeout, request.generation)
    except AllreduceError as error:
        return f"!{str(error).removeprefix('[cluster] ')}", None
    return f"{leader.address} {secret.hex()}", leader


def _share(comm: Any, invitation: str, wait: _Wait) -> tuple[str, str]:
    """Broadcast rank 0's address and secret.

    Raises:
        JoinError: Rank 0 could not start the leader.
        TimeoutError: Rank 0 did not answer.
    """
    encoded = invitation.encode()
    length = _broadcast(comm, len(encoded).to_bytes(8, "big"), wait)
    encoded = encoded.ljust(int.from_bytes(length, "big"), b"\0")
    text = _broadcast(comm, encoded, wait).decode()
    if text.startswith("!"):
        raise JoinError(f"[cluster] rank {comm.Get_rank()}: rank 0 could not start: {text[1:]}")
    address, _, hexed = text.partition(" ")
    return address, hexed


def _broadcast(comm: Any, data: bytes, wait: _Wait) -> bytes:
    """Return rank 0's `data`, which has the same length on all ranks."""
    buffer = bytearray(data)
    _complete(comm, comm.Ibcast(buffer, root=0), wait)
    return bytes(buffer)


def _complete(comm: Any, pending: Any, wait: _Wait) -> None:
    """Wait for a request of MPI's; a rank that never comes is a timeout, not a hang."""
    began = time.monotonic()
    while not pending.Test():
        if not wait.has_time_left():
            raise TimeoutError(
                f"[cluster] rank {comm.Get_rank()}: the MPI ranks did not all join within "
                f"{wait.timeout:g} s: {wait.late()} did not; {REMEDY}"
            )
        waited = time.monotonic() - began
        time.sleep(min(max(_POLL_SECONDS, waited / _POLLS), _LONGEST_POLL_SECONDS))
