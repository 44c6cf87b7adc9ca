"""Which of a launcher's ranks on this host are late to join, as the kernel shows their processes.

MPI_Init waits for all ranks without a timeout. Hence a rank that joins binds an abstract Unix
socket named after its number, and a thread of each waiting rank looks for missing sockets, for
processes that are stopped, and for processes that have ended.
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
from allreduce.events import logger

REMEDY = "every rank has to call allreduce.init()"

_LOOK_SECONDS = 0.25
_LOOKS = 4  # so often in a row a rank has to be missing: the launcher may still be starting it
_LISTED = 8
# The first rank to give up ends the job: mpirun drops output that it has not forwarded by then.
_FORWARDING_SECONDS, _AFTER_YOU_SECONDS = 0.3, 3.0

_kept: dict[str, int] = {}  # the sockets of joins that have failed


class Seat(NamedTuple):
    """A launcher's rank, as its environment tells it."""

    rank: int
    size: int
    variable: str  # that holds the rank
    job: str  # unique among the jobs of this host that run now
    launcher: int = 0  # the process that started the ranks of this host; 0 where that is unknown
    here: int = 0  # the number of ranks on this host; 0 where that is unknown


class Attendance:
    """Shows the other ranks of this host that this one has come, until the context ends.

    After a failure the socket stays: the rank may try again.

    Args:
        seat: This process's place.
        meeting: Names what all ranks come to: "join".
    """

    def __init__(self, seat: Seat, meeting: str) -> None:
        self.seat = seat
        self._name = f"allreduce.{meeting}.{seat.job}"
        own = f"\0{self._name}.{seat.rank}"
        self._own = own
        self._socket = _kept.pop(own) if own in _kept else _bind(own)

    def __enter__(self) -> Attendance:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.close(self._socket)
        else:
            _kept[self._own] = self._socket

    def late(self) -> str:
        """Name the ranks of this host that have not come, or are stopped; "" if none is known."""
        sockets, found = _sockets(), []
        for rank, pid in self._ranks().items():
            stopped = _stopped(pid)
            if stopped or not self._has_come(rank, sockets):
                found.append(f"rank {rank} ({stopped or f'process {pid} is alive'})")
        return ", ".join(found)

    @contextlib.contextmanager
    def watch(self, timeout: float, leftovers: Sequence[str] = ()) -> Iterator[None]:
        """Watch over a call of MPI_Init in the block, which must release the interpreter's lock.

        Warn of a long wait; end the job where a rank of this host has ended, or after `timeout`.

        Args:
            timeout: Seconds that the call may last.
            leftovers: How the names of shared memory begin that is removed before the job ends.
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
        # A wait that is shorter than the time of the warning ends with its own message.
        quiet = timeout <= waiting.WARN_SECONDS or not logger.isEnabledFor(logging.WARNING)
        awake, missing = waiting.Awake(), 0
        while True:
            with contextlib.suppress(queue.Empty):
                return over.get(timeout=_LOOK_SECONDS)
            waited = awake.look()
            missing = missing + 1 if self._ended() else 0
            if missing >= _LOOKS:
                self._end_job(f"{self._ended()} ended before it had joined; {REMEDY}", leftovers)
            if waited >= timeout:
                whom = self._late_anywhere() or "some rank"
                text = f"MPI_Init did not end within {timeout:g} s, for want of {whom}; {REMEDY}"
                self._end_job(text, leftovers)
            if not quiet and waited >= waiting.WARN_SECONDS:
                quiet = True
                self._warn(timeout)

    def _warn(self, timeout: float) -> None:
        """Report the wait, unless a lower rank of this host does."""
        sockets, here = _sockets(), self._ranks()
        for rank in range(self.seat.rank):
            # By its socket, which is seen where its process is not.
            if self._shows(rank, sockets) and not (rank in here and _stopped(here[rank])):
                return
        if whom := self._late_anywhere():
            so_far = f"(for {waiting.WARN_SECONDS:g} s so far, of {timeout:g} s)"
            self._say(f"waiting in MPI_Init for {whom}; {REMEDY} {so_far}")

    def _end_job(self, text: str, leftovers: Sequence[str]) -> NoReturn:
        """End this process, and the job; the first rank of this host that does so says why."""
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as first:
            try:
                first.bind(f"\0{self._name}.over")
            except OSError:  # another rank has said it
                time.sleep(_AFTER_YOU_SECONDS)
                os._exit(1)
            self._say(text)
            time.sleep(_FORWARDING_SECONDS)
            for path in mapped("self"):
                if path.startswith(tuple(leftovers)):
                    Path(path).unlink(missing_ok=True)
            if pmi.connected():
                pmi.abort(1)
                time.sleep(_AFTER_YOU_SECONDS)  # to be ended, like the others
            os._exit(1)

    def _say(self, text: str) -> None:
        os.write(2, f"[allreduce] rank {self.seat.rank}: {text}\n".encode())

    def _ended(self) -> str:
        """Name the ranks of this host whose processes have ended; "" if none is known."""
        here = self._ranks()
        count = self.seat.here - len(here)
        if not here or count <= 0:
            return ""
        return _listed(set(range(self.seat.size)) - here.keys()) if self._all_here else "a rank"

    @property
    def _all_here(self) -> bool:
        return self.seat.here == self.seat.size

    def _late_anywhere(self) -> str:
        """Name the late ranks of this host, else the ranks of which nothing is known here."""
        here = self._ranks()
        if not here:
            return self.late() or "other ranks"
        others = set(range(self.seat.size)) - here.keys()
        return self.late() or (others and f"{_listed(others)} (elsewhere, or ended)") or ""

    def _ranks(self) -> dict[int, int]:
        """Find the processes of this host's ranks that have not ended, by rank."""
        wanted = f"{self.seat.variable}=".encode()
        found = {}
        for pid in children(self.seat.launcher) if self.seat.launcher else ():
            with contextlib.suppress(OSError):  # it has just ended
                for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    number = word.removeprefix(wanted)
                    if number != word and number.isdigit() and int(number) < self.seat.size:
                        found[int(number)] = pid
        return dict(sorted(found.items()))

    def _has_come(self, rank: int, sockets: str) -> bool:
        return rank == self.seat.rank or self._shows(rank, sockets)

    def _shows(self, rank: int, sockets: str) -> bool:
        return f"@{self._name}.{rank}\n" in sockets


def _bind(name: str) -> int:
    """Return the descriptor of a socket with this name, which outlives what Python knows of it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):  # it is taken: a wait may then be reported less exactly
        made.bind(name)
    return made.detach()


def _sockets() -> str:
    try:
        return Path("/proc/net/unix").read_text()
    except OSError:  # /proc is hidden
        return ""


def _stopped(pid: int) -> str:
    """Describe the first stopped process among this one and its descendants; "" for none."""
    family = [pid]  # a shell, or another wrapper, lives while its child is stopped
    for each in family:
        state = process_state(each)
        if STOPPED in state:
            return state
        family += children(each)
    return ""


def _listed(ranks: set[int]) -> str:
    if len(ranks) > _LISTED:
        return f"{len(ranks)} ranks"
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank{'s' * (len(ranks) > 1)} {numbers}"
