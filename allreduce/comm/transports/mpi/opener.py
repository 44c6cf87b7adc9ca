"""How the ranks of MPI become members: they meet in the world's store, then in MPI."""

from __future__ import annotations

import json
import os
import sys
import zlib
from contextlib import nullcontext
from typing import Any

from allreduce.cluster import World
from allreduce.cluster.host.launchers import launcher
from allreduce.cluster.mpi import library
from allreduce.cluster.mpi.arrival_tracker import ArrivalTracker
from allreduce.comm.transports.mpi.mpi_progress import entered
from allreduce.comm.transports.mpi.status_board import StatusBoard
from allreduce.comm.transports.mpi.transport import MpiTransport
from allreduce.comm.transports.mpi.types import Library
from allreduce.errors import AllreduceError, UnsupportedError, UsageError


def open_mpi(
    world: World, local_members: int, *, name: str, timeout: float, quiet: bool = False
) -> list[MpiTransport]:
    """Open this process's member of a transport over all processes of the world.

    Args:
        world: Whose processes; MPI's launcher must have started them.
        local_members: 1: a rank of MPI is one member.
        quiet: Whether a transport above reports the end to all members.

    Raises:
        UsageError: A process was not started by MPI's launcher.
        UnsupportedError: A process brings several members.
    """
    mpi, ranks = _meet(world, local_members, name, timeout)
    tag = zlib.crc32(name.encode()) % mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
    several = mpi.Query_thread() == mpi.THREAD_MULTIPLE
    with nullcontext() if several else entered:  # it blocks: other threads need MPI meanwhile
        members = mpi.COMM_WORLD.Get_group().Incl(ranks)
        data = mpi.COMM_WORLD.Create_group(members, tag)
        members.Free()
        data.Set_errhandler(mpi.ERRORS_RETURN)
        control = data.Dup()
    functions = Library(mpi, sys.maxsize if mpi.Get_version() >= (4, 0) else 2**31 - 1)
    board = StatusBoard(world, name, quiet)
    return [MpiTransport(functions, data, control, world, board, timeout)]


def open_level(
    world: World, local_members: int, *, name: str, timeout: float
) -> list[MpiTransport]:
    """Open it as a level of `hierarchical`, which reports the end to all members."""
    return open_mpi(world, local_members, name=name, timeout=timeout, quiet=True)


def _meet(world: World, local_members: int, name: str, timeout: float) -> tuple[Any, list[int]]:
    """Return MPI's module and every member's rank in MPI's world, or have all members raise."""
    mpi, mine, trouble = None, -1, ""
    try:
        mpi = _library(world, local_members, timeout)
        mine = mpi.COMM_WORLD.Get_rank()
    except AllreduceError as error:
        trouble = str(error)
        raise
    finally:
        facts = json.dumps([mine, trouble]).encode()
        answers = world.exchange(f"mpi/{name}/members", facts, timeout)
    decoded = [json.loads(answer) for answer in answers]
    where = f"[mpi] {world.called()}"
    for _, other in decoded:
        if other:
            raise UsageError(f"{where}: another rank cannot take part: {other}")
    return mpi, [rank for rank, _ in decoded]


def _library(world: World, local_members: int, timeout: float) -> Any:
    """Return `mpi4py.MPI`, initialised by the world."""
    where = f"[mpi] {world.called()}"
    if local_members != 1:
        raise UnsupportedError(
            f"{where}: a process is one member of the mpi transport, but brings {local_members}; "
            "start one process per replica, or choose transport='shared'"
        )
    found = launcher(os.environ)
    if world.source != "mpi" or found is None:
        raise UsageError(
            f"{where}: the mpi transport carries between processes that MPI's launcher started, "
            f"but this world comes from {world.source!r}; start the script with mpirun, or choose "
            "another transport"
        )
    if world.size == 1 and found.size == 1:  # such a world needs no MPI, and has not loaded it
        with ArrivalTracker(library.launched(found)) as arrivals:
            return library.load(found.family, arrivals, timeout)
    mpi = library.imported()
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise UsageError(f"{where}: MPI is not initialised, or finalised already")
    return mpi
