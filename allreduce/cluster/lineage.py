"""A rank's children inherit its environment, but not its place in the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from allreduce.errors import JoinError, UsageError

MARKER = "ALLREDUCE_JOINED"
_EARLY = "launched"  # follows the rank while its process has not joined

_before: str | None = None  # what this process's marker says while it has not joined


def claim(rank: int) -> bool:
    """Note, before joining, that a launcher has given rank `rank` to this process.

    Workers that it starts before it joins inherit the launcher's words with the environment, and
    would take its place.

    Returns:
        Whether the place is this process's: it is not when an ancestor has noted the same.
    """
    global _before
    owner = os.environ.get(MARKER, "").partition(":")[0]
    if owner.isdecimal() and int(owner) in ancestors():
        return False
    _before = f"{os.getpid()}:{rank}:{_EARLY}"
    os.environ[MARKER] = _before
    return True


def mark(rank: int) -> None:
    """Note in the environment, for children to see, that this process takes part in a job."""
    os.environ[MARKER] = f"{os.getpid()}:{rank}"


def unmark() -> None:
    """Note that it has left; a launcher's place stays its own."""
    os.environ.pop(MARKER, None)
    if _before is not None:
        os.environ[MARKER] = _before


def check(environ: Mapping[str, str]) -> None:
    """Refuse a process whose place in the job is another's.

    Raises:
        UsageError: This process has joined already.
        JoinError: It is a child, or grandchild, of a process that has joined or is about to.
    """
    text = environ.get(MARKER)
    if text is None:
        return
    pid, _, place = text.partition(":")
    rank, _, state = place.partition(":")
    if not (pid.isdecimal() and rank.isdecimal()) or state not in ("", _EARLY):
        raise UsageError(
            f"[cluster] {MARKER}={text!r} is not valid: it is set by this library only"
        )
    if int(pid) == os.getpid():
        if state == _EARLY:
            return
        raise UsageError(
            f"[cluster] rank {rank}: this process has joined its job already; close that "
            "world before joining anew"
        )
    if int(pid) in ancestors():
        raise JoinError(
            f"[cluster] process {os.getpid()} is a child of process {pid}, which is rank {rank} of "
            "a job: a rank's children cannot take its place; do not call allreduce.init() in "
            f"workers and helpers, or, for a job of its own, start it without {MARKER} in its "
            "environment"
        )


def ancestors() -> list[int]:
    """List this process's parent, its parent, and so on."""
    found = [os.getppid()]
    while found[-1] > 1:
        try:
            stat = Path(f"/proc/{found[-1]}/stat").read_text()
        except OSError:  # it has just ended
            break
        found.append(int(stat.rpartition(")")[2].split()[1]))
    return found
