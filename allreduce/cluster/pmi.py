"""The line to the launcher of MPICH and Intel MPI, for a rank that has not initialised MPI.

When a rank has ended without MPI, whatever its exit code, that launcher (hydra) lets the others
wait for it in MPI_Init. `cmd=abort` is the word of its process management interface (PMI-1: Balaji
et al., EuroMPI 2010) that ends the job.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_LINE = "PMI_FD"


def connected() -> bool:
    """Say whether hydra itself has started this process: a rank's children inherit its words."""
    text = os.environ.get(_LINE, "")
    try:
        parent = os.path.basename(os.readlink(f"/proc/{os.getppid()}/exe"))
        return stat.S_ISSOCK(os.fstat(int(text)).st_mode) and parent == "hydra_pmi_proxy"
    except (OSError, ValueError):
        return False


def abort(code: int) -> None:
    """End all ranks of the job; `mpirun` returns `code`."""
    os.write(int(os.environ[_LINE]), f"cmd=abort exitcode={code}\n".encode())


def siblings() -> list[int]:
    """List the ranks on this host, this process included."""
    parent = os.getppid()
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
