"""The line to the launcher of MPICH and Intel MPI, for a rank that has not initialised MPI.

When a rank has ended without MPI, whatever its exit code, that launcher (hydra) lets the others
wait for it in MPI_Init. `cmd=abort` is the word of its process management interface (PMI-1: Balaji
et al., EuroMPI 2010) that ends the job.
"""

from __future__ import annotations

import os
import stat

from allreduce.cluster.host.machine import children
from allreduce.cluster.host.process_ancestry import ancestors

# mpirun drops what it has not yet forwarded when a rank aborts (seen with MPICH 5's hydra).
REPORT_SECONDS = 0.1
KILL_SECONDS = 1.0  # for mpirun to kill all ranks

_LINE = "PMI_FD"


def proxy() -> int | None:
    """Find the process by which hydra runs the ranks of this host.

    It need not be the parent: wrappers (a shell, `time`, `uv run`) may stand in between.
    """
    for pid in ancestors():
        try:
            if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "hydra_pmi_proxy":
                return pid
        except OSError:  # it has ended, or is another user's
            continue
    return None


def connected() -> bool:
    """Say whether this process holds a line to hydra; few helpers of a rank inherit that."""
    return _is_open() and proxy() is not None


def severed() -> bool:
    """Say whether this process has a rank's variables without its line, as its children have."""
    return _LINE in os.environ and not _is_open()


def _is_open() -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(int(os.environ.get(_LINE, ""))).st_mode)
    except (OSError, ValueError):
        return False


def line() -> int:
    """Return the descriptor of this process's line to hydra; -1 if it has none."""
    return int(os.environ[_LINE]) if connected() else -1


def abort(code: int) -> None:
    """End all ranks of the job; `mpirun` returns `code`."""
    os.write(int(os.environ[_LINE]), f"cmd=abort exitcode={code}\n".encode())


def siblings() -> list[int]:
    """List the processes of all ranks on this host, this process included."""
    found = [proxy() or os.getpid()]
    for pid in found:  # which grows meanwhile
        found += children(pid)
    return found[1:]
