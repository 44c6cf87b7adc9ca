"""Memory that processes share, allocated before any process maps it.

Touching a page of a mapped file for which there is no memory ends the process with SIGBUS; so all
pages are allocated first, and a shortage is an ordinary error. Allocating beyond the limit of a
control group (a container's, a Slurm step's) raises no error: the kernel kills a process of the
group. So the remaining memory is read first. Files are anonymous memfds: the kernel frees them when
the last process that holds or maps them has ended, for whatever reason.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")
# Of both versions: a group's limit and usage, and the keys of its memory.stat that say how much of
# the usage is cached files, which the kernel drops before it kills. Shared memory is not in these.
_VERSIONS = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
_NO_LIMIT = "max"
_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL of Linux 6.3, which Python does not name
# Errors of memfd_create if a filter of system calls or a security module forbids it.
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_BYTES_PER_ENTRY = 512  # of memory per byte of page table: 8 bytes map 4096


class AvailableMemory(NamedTuple):
    """The bytes that this process can still allocate, and the limit that applies."""

    nbytes: int
    limit: str

    def __str__(self) -> str:
        return f"{self.nbytes} bytes are left of {self.limit}"


def available(root: Path = _ROOT) -> AvailableMemory:
    """Return the tightest limit on this process's memory: the machine's or a control group's.

    Args:
        root: The folder of /proc and /sys, or of substitutes.
    """
    return min((_machine(root), *_groups(root)), key=lambda each: each.nbytes)


def page_tables(nbytes: int, processes: int) -> int:
    """Return the bytes of page tables for a region that `processes` processes map."""
    return nbytes * processes // _BYTES_PER_ENTRY


def check_available(nbytes: int) -> None:
    """Check that the memory is available: the kernel would kill a process to free it.

    Raises:
        OSError: There is less memory (ENOMEM); its text names the limit.
    """
    left = available()
    if nbytes > left.nbytes:
        raise OSError(errno.ENOMEM, f"{nbytes} bytes are needed, and {left}")


def check_mappable(nbytes: int) -> None:
    """Check that the address space suffices, which may be limited; touches no page.

    Raises:
        OSError: It has not (ENOMEM).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:  # an inaccessible mapping takes no memory
        mmap.mmap(-1, nbytes, flags=flags, prot=0).close()
    except OverflowError:
        raise OSError(errno.ENOMEM, f"the address space has no {nbytes} bytes left") from None


def allocate(nbytes: int) -> int:
    """Return the descriptor of a new anonymous file of `nbytes` allocated zeros.

    Raises:
        OSError: There is no memory for it, or no descriptor left.
    """
    check_available(nbytes)
    fd = _create()
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create() -> int:
    """Make an anonymous file.

    Hosts with vm.memfd_noexec=2 refuse one that could be executed; older kernels refuse the flag.
    """
    try:
        return os.memfd_create("allreduce", os.MFD_CLOEXEC | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create("allreduce", os.MFD_CLOEXEC)


def _machine(root: Path) -> AvailableMemory:
    """Return the kernel's estimate of memory available without swapping."""
    sizes = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    total, available = (
        int(sizes[key].split()[0]) * 1024 if key in sizes else 1 << 62
        for key in ("MemTotal", "MemAvailable")
    )
    return AvailableMemory(available, f"this machine's {total}")


def _groups(root: Path) -> Iterator[AvailableMemory]:
    """Yield the memory left in each control group of this process, from its own upwards."""
    for version, top, inside in _hierarchies(root):
        for level in (inside, *inside.parents):
            left = _left(version, top / level)
            if left is not None:
                yield left


def _hierarchies(root: Path) -> Iterator[tuple[str, Path, PurePosixPath]]:
    """Yield the mounted hierarchies of memory groups: version, folder, and our group in it."""
    places: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            places["cgroup"] = name
        elif number == "0":
            places["cgroup2"] = name
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        version, _, options = kind.split(" ", 2)
        if version not in places or (version == "cgroup" and "memory" not in options.split(",")):
            continue
        shown, point = mount.split()[3:5]
        place = PurePosixPath(places[version])
        # A container may see its own group as the root, under its outside name.
        inside = place.relative_to(shown) if place.is_relative_to(shown) else PurePosixPath()
        yield version, root / point.lstrip("/"), inside


def _left(version: str, group: Path) -> AvailableMemory | None:
    """Return the memory left in a group; None without a limit, or outside this container."""
    limit_name, usage_name, reclaimable = _VERSIONS[version]
    try:
        limit = (group / limit_name).read_text().strip()
        used = int((group / usage_name).read_text())
    except (OSError, ValueError):
        return None
    if limit == _NO_LIMIT:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
    used -= sum(int(stat.get(key, 0)) for key in reclaimable)
    return AvailableMemory(
        max(0, int(limit) - used), f"the {limit} that {group / limit_name} allows"
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # missing in old kernels, or hidden by a container
        return []
