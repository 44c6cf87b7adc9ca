"""Load mpi4py's MPI library, and check that it understands this process's launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allreduce.cluster.host import limits
from allreduce.cluster.host.launchers import Launcher
from allreduce.cluster.host.machine import mapped
from allreduce.cluster.host.process_ancestry import ancestors
from allreduce.cluster.mpi import pmi
from allreduce.cluster.mpi.arrival_tracker import ArrivalTracker, LaunchedRank
from allreduce.errors import JoinError
from allreduce.importing import importing

_HYDRA = ("mpiexec.hydra", "hydra_pmi_proxy")  # MPICH's and Intel MPI's
_PRRTE = ("orterun", "orted", "prterun", "prte", "prted")  # Open MPI's
_LAUNCHERS = frozenset(("mpirun", "mpiexec", "srun", "slurmstepd", *_HYDRA, *_PRRTE))
_FILES = 14  # opened by MPICH 5 to initialise, over UCX on one host; it aborts if it cannot
# Shared memory: MPICH maps it in MPI_Init, Open MPI at the first communication.
MAPPED_BY_ALL = ("/dev/shm/mpich_shm_",)
_SEGMENTS = (*MAPPED_BY_ALL, "/dev/shm/sm_segment.", "/dev/shm/Intel_MPI_")

_finalizing = 0  # the process in which we finalise MPI instead of mpi4py


def load(launcher_family: str, arrivals: ArrivalTracker, timeout: float) -> Any:
    """Import `mpi4py.MPI` and initialise MPI, unless that is done.

    Checks the library before MPI_Init, because MPICH's ends the process under Open MPI's launcher.
    This process ends if a rank does not arrive within `timeout` seconds.

    Raises:
        JoinError: The library cannot be loaded, is finalised, or does not understand the launcher,
            or this process may open too few files.
    """
    rank = arrivals.launched.rank
    try:
        mpi = imported()
    except (ImportError, RuntimeError, OSError) as error:
        raise mismatch(launcher_family, rank, f"mpi4py cannot load a library: {error}") from error
    if mpi.Is_finalized():
        raise JoinError(
            f"[cluster] rank {rank}: this process has finalised MPI, which cannot be initialised "
            "again; call allreduce.init() before MPI.Finalize()"
        )
    if mpi.Is_initialized():
        return mpi
    library = family(mpi.Get_library_version())
    if launcher_family == "Open MPI" and library != "Open MPI" and not _maps("libpmix"):
        raise mismatch(
            launcher_family, rank, f"{library} cannot learn its ranks from Open MPI's launcher"
        )
    wanted = f"[cluster] rank {rank}: cannot initialise MPI and join"
    limits.check_files(_FILES + limits.CHANNEL_FILES, wanted)
    try:
        with warnings.catch_warnings():
            # mpi4py warns of a launcher that does not fit; we compare sizes and raise instead.
            warnings.simplefilter("ignore", RuntimeWarning)
            _initialize(mpi, arrivals, timeout)
    except mpi.Exception as error:
        reason = f"MPI_Init failed ({arrivals.launched.size} ranks): {error}"
        raise mismatch(launcher_family, rank, reason) from error
    return mpi


def _initialize(mpi: Any, arrivals: ArrivalTracker, timeout: float) -> None:
    # By ctypes: mpi4py's Init_thread holds the interpreter's lock, but the watch needs it.
    library = ctypes.CDLL(library_path())
    # MPICH's library crashes when a signal interrupts its wait for the other ranks.
    unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        with arrivals.watch(timeout, _SEGMENTS):
            provided = ctypes.byref(ctypes.c_int())
            code = library.MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, provided)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
    if code != mpi.SUCCESS:
        raise mpi.Exception(code)
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):  # as mpi4py does where it initialises MPI
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    if os.getpid() == _finalizing:
        from allreduce import _native  # loaded late, as ranks without MPI do not need it yet

        finalize, finalized = map(_address, (library.MPI_Finalize, library.MPI_Finalized))
        _native.finalize_mpi_at_exit(finalize, finalized, pmi.fd(), str(arrivals.launched.rank))


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None, "a library's function has one"
    return address


def imported() -> Any:
    """Import `mpi4py.MPI` without having it initialise MPI, or finalise it at exit.

    We finalise MPI, unless the program imported mpi4py before: mpi4py does so at the end of a
    forked child, too, and there waits for the other ranks.
    """
    global _finalizing
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        _finalizing = os.getpid()
    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
    try:
        with importing():
            from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before
    return MPI


def finalized() -> bool:
    """Return whether this process has finalised MPI: any further call would end it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_finalized())


def family(version: str) -> str:
    """Name the implementation from `MPI_Get_library_version`'s text."""
    known = (("Open MPI", "Open MPI"), ("Intel(R) MPI", "Intel MPI"), ("MPICH", "MPICH"))
    return next((name for sign, name in known if sign in version), version.split(",")[0][:40])


def mismatch(launcher_family: str, rank: int, reason: str) -> JoinError:
    """Build the error for a launcher and a library that do not match, with both paths."""
    return JoinError(
        f"[cluster] rank {rank}: the MPI library does not belong to the launcher: {reason}. "
        f"The launcher is {launcher_path(launcher_family)}; the library is {library_path()}. "
        "Use the mpirun of the library's installation (for the mpich wheel: the one beside this "
        f"Python, in {os.path.dirname(sys.executable)}), or point MPI4PY_LIBMPI to the "
        "launcher's libmpi"
    )


def library_path() -> str:
    """Find the file of the loaded MPI library."""
    asked = os.environ.get("MPI4PY_LIBMPI")
    absent = f"{asked} (as MPI4PY_LIBMPI says), which does not load" if asked else "not loaded"
    return _maps("libmpi.so") or _maps("libmpi") or absent


def launched(found: Launcher) -> LaunchedRank:
    """Return this process's rank and size by its launcher's variables."""
    pid = next((pid for pid in ancestors() if _launcher_file(pid) is not None), 0)
    local = os.environ.get("MPI_LOCALNRANKS", "")  # hydra's
    here = int(local) if local.isdecimal() else 0
    return LaunchedRank(found.rank, found.size, found.rank_variable, str(pid), pid, here)


def launcher_path(launcher_family: str) -> str:
    """Find the executable that started this process: the topmost launcher among its ancestors."""
    found = None
    for pid in ancestors():
        found = _launcher_file(pid) or found
    return found or f"{launcher_family}'s mpirun"


def unlink_segments(
    prefixes: tuple[str, ...] = _SEGMENTS, processes: Iterable[int | str] = ("self",)
) -> None:
    """Remove the shared memory's names that the MPI library would remove when it is finalised.

    The mappings of running ranks stay valid. All names are for a job that is about to be aborted;
    `MAPPED_BY_ALL` can be removed as soon as all ranks have initialised MPI.
    """
    for pid in processes:
        for path in mapped(pid):
            if path.startswith(prefixes):
                Path(path).unlink(missing_ok=True)


def _launcher_file(pid: int) -> str | None:
    process = Path(f"/proc/{pid}")
    try:
        executable = os.readlink(process / "exe")
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:2]
    except OSError:  # it has ended, or is another user's
        return None
    candidates = [executable, *words]  # words: mpirun may be a script or a wrapper
    return next((file for file in candidates if os.path.basename(file) in _LAUNCHERS), None)


def _maps(part: str) -> str | None:
    return next((path for path in mapped("self") if part in os.path.basename(path)), None)
