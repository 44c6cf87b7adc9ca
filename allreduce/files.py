"""Files that are replaced whole or not at all, also where the writer is killed."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

# Of the files that become others once they are complete.
_PREFIX = ".allreduce-writing-"


def replace(path: Path, contents: bytes) -> None:
    """Write a file in the place of an old one; several processes may do so at once.

    The contents go to a temporary file beside it, which is made durable and renamed. Temporary
    files in that folder whose writers were killed are removed.

    Raises:
        OSError: The system does not take the file; then an old one is as it was.
    """
    _remove_abandoned(path.parent)
    handle, temporary = _create(path.parent)
    with os.fdopen(handle, "wb") as file:  # whose end releases the lock, after the renaming
        try:
            file.write(contents)
            file.flush()
            os.fsync(handle)
            os.fchmod(handle, 0o666 & ~_umask())  # mkstemp lets nobody else read it
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def _create(folder: Path) -> tuple[int, str]:
    """Make a temporary file and lock it for as long as it is open, so that nobody removes it."""
    while True:
        handle, name = tempfile.mkstemp(dir=folder, prefix=_PREFIX)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process took it for abandoned before it was locked
            os.close(handle)
            continue
        except OSError:  # a file system without locks, on which nothing is removed either
            return handle, name
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another process has removed it


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files that no process holds a lock of."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is renamed by now, being written, or another user's
            handle = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


def _umask() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("Umask:")[1].split()[0], 8)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
