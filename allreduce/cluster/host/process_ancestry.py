"""Detect children of ranks: they inherit a rank's environment, but not its place in the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from allreduce.cluster.host.launchers import rank_of_several
from allreduce.errors import JoinError, UsageError
from allreduce.importing import PROCESS

MARKER = "ALLREDUCE_JOINED"


def set_marker(rank: int) -> None:
    """Record in the environment, for children to see, that this process is a rank."""
    os.environ[MARKER] = f"{os.getpid()}:{rank}"


def clear_marker() -> None:
    """Remove the record."""
    os.environ.pop(MARKER, None)


def check(environ: Mapping[str, str]) -> None:
    """Raise if this process inherited its place in the job from another one.

    Raises:
        UsageError: This process has joined already.
        JoinError: It is a child, or grandchild, of a process that has joined, or a forked child of
            one that a launcher has started as a rank.
    """
    text = environ.get(MARKER)
    if text is None and os.getpid() != PROCESS:
        started_as = rank_of_several(_environment_at_start())
        text = None if started_as is None else f"{PROCESS}:{started_as}"
    if text is None:
        return
    pid, _, rank = text.partition(":")
    if not (pid.isdecimal() and rank.isdecimal()):
        raise UsageError(
            f"[cluster] {MARKER}={text!r} is not valid: it is set by this library only"
        )
    if int(pid) == os.getpid():
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


def _environment_at_start() -> dict[str, str]:
    """Return the environment at exec; a fork does not change it."""
    try:
        words = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # /proc is hidden
        return {}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


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
