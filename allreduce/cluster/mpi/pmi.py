"""Talk to hydra, the launcher of MPICH and Intel MPI, from a rank that has not initialised MPI.

If a rank ends without MPI_Init, with any exit code, hydra lets the others wait for it in MPI_Init.
The message `cmd=abort` of its process management interface (PMI-1: Balaji et al., EuroMPI 2010)
ends the job.
"""

from __future__ import annotations

import os
import stat

from allreduce.cluster.host.machine import children
from allreduce.cluster.host.process_ancestry import ancestors

# mpirun drops output that it has not forwarded when a rank aborts (seen with MPICH 5's hydra).
REPORT_SECONDS = 0.1
KILL_SECONDS = 1.0  # for mpirun to kill all ranks

_FD = "PMI_FD"


def proxy() -> int | None:
    """Find the hydra process that started the ranks of this host.

    It need not be the parent: wrappers (a shell, `time`, `uv run`) may be between them.
    """
    for pid in ancestors():
        try:
            if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "hydra_pmi_proxy":
                return pid
        except OSError:  # it has ended, or is another user's
            continue
    return None


def connected() -> bool:
    """Return whether this process has a connection to hydra; few children of a rank inherit it."""
    return _is_open() and proxy() is not None


def has_lost_connection() -> bool:
    """Return whether it has a rank's variables without its connection, as a rank's children do."""
    return _FD in os.environ and not _is_open()


def _is_open() -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(int(os.environ.get(_FD, ""))).st_mode)
    except (OSError, ValueError):
        return False


def fd() -> int:
    """Return the descriptor of this process's connection to hydra; -1 if it has none."""
    return int(os.environ[_FD]) if connected() else -1


def abort(code: int) -> None:
    """End all ranks of the job; `mpirun` returns `code`."""
    os.write(int(os.environ[_FD]), f"cmd=abort exitcode={code}\n".encode())


def siblings() -> list[int]:
    """List the processes of all ranks on this host, this process included."""
    found = [proxy() or os.getpid()]
    for pid in found:  # grows during the loop
        found += children(pid)
    return found[1:]
