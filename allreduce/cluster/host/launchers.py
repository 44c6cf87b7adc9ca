"""Read the launchers' environment variables; incomplete sets of them are errors.

If the environment says that the job has several ranks, this process must never run as a world of
one: its siblings would do the same, each training a model of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from allreduce.errors import JoinError

# Slurm's step ids from here on are the batch script's, the interactive shell's and others'.
_NO_STEP = 0xFFFFFFF0


class Launcher(NamedTuple):
    """The rank that an MPI launcher gave this process."""

    family: str  # the implementation, as `mpi.library.family` names libraries
    rank_variable: str
    size_variable: str
    rank: int
    size: int

    def __str__(self) -> str:
        return (
            f"{self.family}'s launcher has set {self.rank_variable}={self.rank} and "
            f"{self.size_variable}={self.size}"
        )


# A Slurm step sets PMI_RANK and PMI_SIZE too; hydra, which MPICH and Intel MPI share, alone sets
# MPI_LOCALNRANKS. Without either, PMI_SIZE is that of another PMI launcher.
_VARIABLES = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process as a task of a step."""
    number = environ.get("SLURM_STEP_ID", "")
    return "SLURM_JOB_ID" in environ and number.isdecimal() and int(number) < _NO_STEP


def launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the MPI launcher that started this process, if any.

    Raises:
        JoinError: Its variables contain no valid rank and size.
    """
    for family, rank_variable, size_variable in _VARIABLES:
        rank, size = environ.get(rank_variable), environ.get(size_variable)
        by_slurm = in_step(environ) and "MPI_LOCALNRANKS" not in environ
        if (rank is None and size is None) or (family == "MPICH" and by_slurm):
            continue
        if not _is_place(rank, size):
            raise JoinError(
                f"[cluster] {_shown(environ, rank_variable, size_variable)}: expected a rank below "
                f"a size; start the script with mpirun, or remove both from its environment"
            )
        if family == "MPICH" and "I_MPI_MPIRUN" in environ:
            family = "Intel MPI"
        return Launcher(family, rank_variable, size_variable, int(rank or ""), int(size or ""))
    return None


def rank_of_several(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank in a job of several ranks, if a launcher gave it one.

    Ignores malformed variables: `join()` reports them.
    """
    try:
        mpi = launcher(environ)
    except JoinError:
        mpi = None
    places = [(environ.get("ALLREDUCE_RANK"), environ.get("ALLREDUCE_SIZE"))]
    if mpi is not None:
        places.append((str(mpi.rank), str(mpi.size)))
    if in_step(environ):
        places.append((environ.get("SLURM_PROCID"), step_size(environ)))
    for rank, size in places:
        if _is_place(rank, size) and size != "1":
            return int(rank or "")
    return None


def step_size(environ: Mapping[str, str]) -> str:
    """Return the step's number of tasks, as text."""
    return environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")


def check_single(environ: Mapping[str, str]) -> None:
    """Refuse a world of one if a launcher made this process a rank of a larger job.

    Raises:
        JoinError: A PMIx launcher did, without the number of ranks.
    """
    if "PMIX_RANK" in environ and "PMIX_NAMESPACE" in environ:
        raise JoinError(
            f"[cluster] {_shown(environ, 'PMIX_RANK', 'PMIX_NAMESPACE')}: a PMIx launcher has "
            "started this process as a rank, but nothing says of how many; start the script with "
            "mpirun, srun or python -m allreduce.run, or remove these variables from its "
            "environment"
        )


def _is_place(rank: str | None, size: str | None) -> bool:
    if rank is None or size is None or not (rank.isdecimal() and size.isdecimal()):
        return False
    return int(rank) < int(size)


def _shown(environ: Mapping[str, str], *names: str) -> str:
    parts = [f"{name}={environ[name]!r}" if name in environ else f"no {name}" for name in names]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
