"""The members of a communicator, as error messages name them."""

from __future__ import annotations

from dataclasses import dataclass

from allreduce.cluster.host.machine import STOPPED, process_state
from allreduce.cluster.store import rank_text


@dataclass(frozen=True)
class MemberInfo:
    """One member of a communicator."""

    index: int
    rank: int
    pid: int
    replicated: bool  # whether a process may have several members

    def __str__(self) -> str:
        if self.replicated:
            return f"replica {self.index} (rank {self.rank})"
        return rank_text(self.rank, self.index)

    @property
    def state(self) -> str:
        """Describe the state of its process."""
        return process_state(self.pid)

    @property
    def stopped(self) -> bool:
        """Whether its process is known to be stopped."""
        return STOPPED in self.state

    @property
    def lost(self) -> str:
        """Explain a connection that closed without a notice."""
        return "it was killed, crashed or called os._exit; its launcher reports the exit status"
