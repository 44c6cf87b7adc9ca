"""The members of a communicator, as messages tell of them: who they are, and whether they live."""

from __future__ import annotations

from dataclasses import dataclass

from allreduce.cluster.host.machine import STOPPED, process_state
from allreduce.cluster.world import rank_text


@dataclass(frozen=True)
class MemberInfo:
    """One member of a communicator: where it lives."""

    index: int
    rank: int
    pid: int
    replicated: bool  # whether processes have several members in this communicator

    def __str__(self) -> str:
        if self.replicated:
            return f"replica {self.index} (rank {self.rank})"
        return rank_text(self.rank, self.index)

    @property
    def state(self) -> str:
        """Say whether its process lives."""
        return process_state(self.pid)

    @property
    def stopped(self) -> bool:
        """Whether its process is known to be stopped."""
        return STOPPED in self.state

    @property
    def lost(self) -> str:
        """Say what may have become of it when its connection ends without a word."""
        return "it was killed, crashed or called os._exit; what started it tells its exit status"
