"""Find which of a launcher's ranks on this host are late to join, from /proc.

MPI_Init waits for all ranks without a timeout. Hence each joining rank binds an abstract Unix
socket named after its number, and a thread of each waiting rank looks for missing sockets, stopped
processes and ended processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from allreduce.cluster.host import waiting
from allreduce.cluster.host.machine import STOPPED, children, mapped, process_state
from allreduce.cluster.mpi import pmi
from allreduce.cluster.store import ranks_text
from allreduce.events import logger

REMEDY = "every rank has to call allreduce.init()"

_POLL_SECONDS = 0.25
_POLLS = 4  # looks in a row that must miss a rank: the launcher may still be starting it
_LISTED = 8
# Until the first rank that gives up ends the job: mpirun drops output that it has not forwarded.
_FORWARDING_SECONDS, _AFTER_YOU_SECONDS = 0.3, 3.0

_kept: dict[str, int] = {}  # the sockets of failed joins


class LaunchedRank(NamedTuple):
    """A launcher's rank, from its environment."""

    rank: int
    size: int
    variable: str  # the environment variable with the rank
    job: str  # unique among the running jobs of this host
    launcher: int = 0  # the process that started the ranks of this host; 0: unknown
    here: int = 0  # the number of ranks on this host; 0: unknown


class ArrivalTracker:
    """Shows the other ranks of this host that this one has arrived, until the context ends.

    After a failure the socket stays, as the rank may try again.
    """

    def __init__(self, launched: LaunchedRank) -> None:
        self.launched = launched
        self._name = f"allreduce.join.{launched.job}"
        self._own = f"\0{self._name}.{launched.rank}"
        self._socket = _kept.pop(self._own) if self._own in _kept else _bind(self._own)

    def __enter__(self) -> ArrivalTracker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.close(self._socket)
        else:
            _kept[self._own] = self._socket

    def late(self) -> str:
        """Name the ranks of this host that have not arrived, or are stopped; "" if none."""
        sockets, found = _sockets(), []
        for rank, pid in self._ranks().items():
            stopped = _stopped(pid)
            if stopped or not self._has_come(rank, sockets):
                found.append(f"rank {rank} ({stopped or f'process {pid} is alive'})")
        return ", ".join(found)

    @contextlib.contextmanager
    def watch(self, timeout: float, leftovers: Sequence[str] = ()) -> Iterator[None]:
        """Watch a call of MPI_Init in the block; the call must release the interpreter's lock.

        Warns of a long wait, and ends the job if a rank of this host has ended, or after `timeout`.

        Args:
            leftovers: Prefixes of shared-memory files to remove before the job ends.
        """
        over: queue.SimpleQueue[None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._watch, args=(over, timeout, leftovers), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.put(None)
            thread.join()

    def _watch(
        self, over: queue.SimpleQueue[None], timeout: float, leftovers: Sequence[str]
    ) -> None:
        # A timeout before the warning ends the wait with its own message.
        quiet = timeout <= waiting.WARN_SECONDS or not logger.isEnabledFor(logging.WARNING)
        awake, missing = waiting.AwakeClock(), 0
        while True:
            with contextlib.suppress(queue.Empty):
                return over.get(timeout=_POLL_SECONDS)
            waited = awake.look()
            missing = missing + 1 if self._ended() else 0
            if missing >= _POLLS:
                self._end_job(f"{self._ended()} ended before it had joined; {REMEDY}", leftovers)
            if waited >= timeout:
                whom = self._late_anywhere() or "some rank"
                text = f"MPI_Init did not end within {timeout:g} s: it waited for {whom}; {REMEDY}"
                self._end_job(text, leftovers)
            if not quiet and waited >= waiting.WARN_SECONDS:
                quiet = True
                self._warn(timeout)

    def _warn(self, timeout: float) -> None:
        """Report the wait, unless a lower rank of this host does so."""
        sockets, here = _sockets(), self._ranks()
        for rank in range(self.launched.rank):
            # By its socket: its process may be hidden.
            if self._shows(rank, sockets) and not (rank in here and _stopped(here[rank])):
                return
        if whom := self._late_anywhere():
            so_far = f"(for {waiting.WARN_SECONDS:g} s so far, of {timeout:g} s)"
            self._say(f"waiting in MPI_Init for {whom}; {REMEDY} {so_far}")

    def _end_job(self, text: str, leftovers: Sequence[str]) -> NoReturn:
        """End this process and the job; the first rank of this host to do so prints why."""
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as first:
            try:
                first.bind(f"\0{self._name}.over")
            except OSError:  # another rank has printed it
                time.sleep(_AFTER_YOU_SECONDS)
                os._exit(1)
            self._say(text)
            time.sleep(_FORWARDING_SECONDS)
            for path in mapped("self"):
                if path.startswith(tuple(leftovers)):
                    Path(path).unlink(missing_ok=True)
            if pmi.connected():
                pmi.abort(1)
                time.sleep(_AFTER_YOU_SECONDS)  # until hydra kills all ranks
            os._exit(1)

    def _say(self, text: str) -> None:
        os.write(2, f"[allreduce] rank {self.launched.rank}: {text}\n".encode())

    def _ended(self) -> str:
        """Name the ranks of this host whose processes have ended; "" if none is known."""
        here = self._ranks()
        count = self.launched.here - len(here)
        if not here or count <= 0:
            return ""
        if self.launched.here < self.launched.size:
            return "a rank"
        return _listed(set(range(self.launched.size)) - here.keys())

    def _late_anywhere(self) -> str:
        """Name the late ranks of this host, else the ranks that are unknown here."""
        here = self._ranks()
        if not here:
            return self.late() or "other ranks"
        others = set(range(self.launched.size)) - here.keys()
        return self.late() or (others and f"{_listed(others)} (elsewhere, or ended)") or ""

    def _ranks(self) -> dict[int, int]:
        """Return the living processes of this host's ranks, by rank."""
        wanted = f"{self.launched.variable}=".encode()
        found = {}
        for pid in children(self.launched.launcher) if self.launched.launcher else ():
            with contextlib.suppress(OSError):  # it has just ended
                for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    number = word.removeprefix(wanted)
                    if number != word and number.isdigit() and int(number) < self.launched.size:
                        found[int(number)] = pid
        return dict(sorted(found.items()))

    def _has_come(self, rank: int, sockets: str) -> bool:
        return rank == self.launched.rank or self._shows(rank, sockets)

    def _shows(self, rank: int, sockets: str) -> bool:
        return f"@{self._name}.{rank}\n" in sockets


def _bind(name: str) -> int:
    """Return the descriptor of a socket bound to this name; it outlives the Python object."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):  # the name is taken: reports of waits may be less exact
        made.bind(name)
    return made.detach()


def _sockets() -> str:
    try:
        return Path("/proc/net/unix").read_text()
    except OSError:  # /proc is hidden
        return ""


def _stopped(pid: int) -> str:
    """Describe the first stopped process among this one and its descendants; "" for none."""
    family = [pid]  # a wrapper such as a shell runs while its child is stopped
    for each in family:
        state = process_state(each)
        if STOPPED in state:
            return state
        family += children(each)
    return ""


def _listed(ranks: set[int]) -> str:
    return f"{len(ranks)} ranks" if len(ranks) > _LISTED else ranks_text(sorted(ranks))
