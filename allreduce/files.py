"""Replace files atomically, even if the writer is killed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PREFIX = ".allreduce-writing-"  # of temporary files, which are renamed when they are complete

_FULL = "make room there, or name a file elsewhere"
_PERMISSION = "allow to write there, or name a file elsewhere"
# The remedy if the system refuses a file, by its error.
_REMEDIES: Mapping[int | None, str] = {
    errno.EACCES: _PERMISSION,
    errno.EDQUOT: _FULL,
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOSPC: _FULL,
    errno.EPERM: _PERMISSION,
    errno.EROFS: _PERMISSION,
}


def refusal(error: OSError) -> str:
    """Return the system's reason for refusing to write a file, and the remedy."""
    remedy = _REMEDIES.get(error.errno, "name a file elsewhere")
    return f"{error.strerror or error}; {remedy}"


def replace(path: Path, contents: bytes) -> None:
    """Write or replace a file; several processes may do so at once.

    Writes a temporary file in the same folder, syncs it to disk, and renames it. Removes temporary
    files of this host's killed writers in that folder.

    Raises:
        OSError: The file cannot be written; an old one is unchanged.
    """
    _remove_abandoned(path.parent)
    handle, temporary = _create(path.parent)
    with os.fdopen(handle, "wb") as file:  # closing it releases the lock, after the rename
        try:
            file.write(contents)
            file.flush()
            os.fsync(handle)
            os.fchmod(handle, 0o666 & ~_umask())  # mkstemp makes it readable by its owner only
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def _create(folder: Path) -> tuple[int, str]:
    """Make a temporary file and lock it while it is open, so that no other process removes it."""
    while True:
        handle, name = tempfile.mkstemp(dir=folder, prefix=_prefix())
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is removing it: it was not locked yet
            os.close(handle)
            continue
        except OSError:  # a file system without locks: nothing is removed there
            return handle, name
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another process has removed it


def _remove_abandoned(folder: Path) -> None:
    """Remove this host's temporary files that no process has locked."""
    for path in folder.glob(f"{_prefix()}*"):
        with suppress(OSError):  # renamed by now, being written, or another user's
            handle = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


def _prefix() -> str:
    """Return the prefix of this host's temporary files, until it is booted again.

    Network file systems may keep locks on each host, where others do not see them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # /proc is hidden
        boot = "unknown boot"
    host = hashlib.sha256(f"{socket.gethostname()}/{boot}".encode()).hexdigest()
    return f"{_PREFIX}{host[:16]}-"


def _umask() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("Umask:")[1].split()[0], 8)
    except (OSError, IndexError):  # /proc is hidden, or Linux is older than 4.7
        mask = os.umask(0o077)  # for a moment also of the files that other threads make
        os.umask(mask)
        return mask


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
