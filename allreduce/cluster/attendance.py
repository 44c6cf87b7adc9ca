"""Who is late where all of a launcher's ranks meet, as this host's processes show it.

MPI's first and last calls wait for all ranks and hold the interpreter meanwhile: who waits can
neither ask nor be asked there. So whoever comes holds an abstract Unix socket with its number, and
native code looks who does not, and whose process is stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from allreduce.cluster import pmi, waiting
from allreduce.cluster.machine import STATES, STOPPED
from allreduce.events import logger

# Not who is dead: a child that nobody has waited for keeps no rank from coming.
_STOPPED = {letter: words for letter, words in STATES.items() if STOPPED in words}

_kept: dict[str, int] = {}  # of meetings that have failed


class Seat(NamedTuple):
    """A launcher's rank, as its environment tells it."""

    rank: int
    size: int
    variable: str  # that holds the rank
    job: str  # unique among the jobs of this host that run now
    launcher: int = 0  # the process that started the ranks of this host; 0 where that is unknown


class Attendance:
    """This rank has come, until it leaves: the others' `late()` does not name it.

    As a context it leaves at the end; otherwise it never does, while its process lives.

    Args:
        seat: Whose.
        meeting: What all ranks come to: "join".
    """

    def __init__(self, seat: Seat, meeting: str) -> None:
        from allreduce import _native  # which others than MPI's ranks need not load to join

        name = f"allreduce.{meeting}.{seat.job}"
        self.seat = seat
        self._roll: Any = _native.Roll(
            name, seat.launcher, seat.variable, seat.rank, seat.size, _STOPPED
        )
        self._native = _native
        self._name = f"\0{name}.{seat.rank}"
        self._sign = _kept.pop(self._name) if self._name in _kept else _sign(self._name)

    def __enter__(self) -> Attendance:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Be counted no more, as all have come; who has failed goes on to have come."""
        if kind is None:
            os.close(self._sign)
        else:
            _kept[self._name] = self._sign

    def late(self) -> str:
        """Name the ranks of this host that have not come, or are stopped; "" if none is known."""
        return str(self._roll.late())

    @contextlib.contextmanager
    def watch(
        self, call: str, remedy: str, timeout: float = 0.0, leftovers: Sequence[str] = ()
    ) -> Iterator[None]:
        """Tell for whom a call of MPI's waits, when it does so for long.

        The lowest rank of this host that has come tells it; that the wait is over tells the first
        for which it is.

        Args:
            call: Its name.
            remedy: What the others have to do.
            timeout: Seconds after which this process ends, and the job; 0 for never.
            leftovers: How files begin that are removed then, if this process maps them.
        """
        before = f"[allreduce] rank {self.seat.rank}: "
        so_far = f"for {waiting.WARN_SECONDS:g} s so far" + (timeout > 0) * f", of {timeout:g} s"
        told = not 0 < timeout <= waiting.WARN_SECONDS and logger.isEnabledFor(logging.WARNING)
        vigil = self._native.Vigil(
            self._roll,
            (
                waiting.WARN_SECONDS if told else 0.0,
                f"{before}waiting in {call} for ",
                f"{remedy} ({so_far})",
            ),
            (
                timeout,
                f"{before}{call} did not end within {timeout:g} s, for want of ",
                remedy,
            ),
            list(leftovers),
            pmi.line() if timeout else -1,
        )
        try:
            yield
        finally:
            vigil.end()


def _sign(name: str) -> int:
    """Return the descriptor of a socket with this name, which outlives what Python knows of it."""
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):  # it is taken: a wait may then be told less exactly
        sign.bind(name)
    return sign.detach()
