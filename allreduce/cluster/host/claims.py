"""Names that processes of this host claim, and signs by which ending ranks wait for each other.

A claim is an abstract Unix socket: the kernel frees it when its process ends, however it ends.
"""

from __future__ import annotations

import socket
import time

_POLL_SECONDS = 0.05  # between looks whether other ranks of this host still end


def claim(name: str) -> socket.socket | None:
    """Claim a name on this host, until the socket is closed; None if a living process has it."""
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claimed.bind(f"\0allreduce.{name}")
    except OSError:
        claimed.close()
        return None
    return claimed


def is_claimed(name: str) -> bool:
    """Return whether a living process of this host has claimed a name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as visitor:
        return visitor.connect_ex(f"\0allreduce.{name}") == 0


class EndingSign:
    """Shows the other ranks of this host that this rank is ending, until it waits for theirs.

    Attributes:
        others: The names that the other ranks claim while they are ending.
    """

    def __init__(self, job: str, rank: int, size: int) -> None:
        self.others = [f"ending.{job}.{other}" for other in range(size) if other != rank]
        self._claim = claim(f"ending.{job}.{rank}")

    def await_others(self, until: float) -> None:
        """Wait until no other rank of this host is ending, or until `time.monotonic() == until`."""
        if self._claim is None:
            return
        self._claim.close()
        while time.monotonic() < until and any(map(is_claimed, self.others)):
            time.sleep(_POLL_SECONDS)

    def fileno(self) -> int:
        """Return the descriptor of the claim; -1 if another process has its name."""
        return -1 if self._claim is None else self._claim.fileno()

    def detach(self) -> None:
        """Leave closing the descriptor to somebody else."""
        if self._claim is not None:
            self._claim.detach()
