"""What a member of a tcp communicator can say about its end."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, ClassVar

from allreduce.comm.call import Call
from allreduce.comm.failures import MemberInfo, Witness
from allreduce.comm.tcp_calls import decode


@dataclass(frozen=True)
class TcpMemberInfo(MemberInfo):
    """One member of a tcp communicator, perhaps on another host."""

    host: str

    @property
    def state(self) -> str:
        if self.host == socket.gethostname():
            return super().state
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class TcpWitness(Witness):
    """As a shared transport's, with the calls that frames have told."""

    transport: ClassVar[str] = "tcp"

    def read(self, words: Any) -> Call:
        return decode(words, self.name)

    def difference(self, low: int, high: int, seq: int) -> str:
        """Say which share of an all_to_all does not fit."""
        first, second = self.call(low, seq), self.call(high, seq)
        assert first is not None, "the calls were compared before"
        assert second is not None, "both of them"
        for sends, gets, a, b in ((first, second, low, high), (second, first, high, low)):
            if sends.counts and gets.receives and sends.counts[b] != gets.receives[a]:
                roles = ("{a}", "{b}") if a == low else ("{b}", "{a}")
                return (
                    f"{sends.counts[b]} elements from {roles[0]} to {roles[1]}, which expects "
                    f"{gets.receives[a]}"
                )
        return f"{first} on {{a}} but {second} on {{b}}"
