"""What a member of a shared communicator can say about its end in a send or recv."""

from __future__ import annotations

from allreduce import _native
from allreduce.comm.calls.call import ANY, COLLECTIVES, DTYPES, Call
from allreduce.comm.calls.call_site import Note
from allreduce.comm.failures.mismatch import Side, story
from allreduce.comm.failures.reporter import build_error
from allreduce.comm.transports.shared.failures import SharedWitness
from allreduce.errors import AllreduceError, Finding


class MessageWitness(SharedWitness):
    """Only two members take part in a message; the one who blamed the other tells of it."""

    def waiting(self, work: _native.Work) -> str:
        """Say which call a work waits in, and for whom."""
        if not work.seq & _native.MESSAGE:
            return f"{self.named(self.me, work.seq)}: {self.missing(work.seq)}"
        call = self._posted(work)
        return f"{call}: {self._absent(call)}"

    def made(self, native: _native.Work) -> Call | None:
        return self._posted(native) if native.seq & _native.MESSAGE else super().made(native)

    def error(self, native: _native.Work | None = None, own: Call | None = None) -> AllreduceError:
        found = self.group.culprit()
        assert found is not None, "only a dead communicator has an error"
        fault, member, witness, seq, reason = found
        if not seq & _native.MESSAGE:
            return super().error(native, own)
        told = self.group.told(witness)
        call = self._message(*told[0][:5])
        blamed, teller = self.members[member], self.members[witness]
        if fault == "mismatch":
            taken = Side(str(teller), call, Note.unpack(told[0][5]), witness == self.me)
            sent = self._message(*told[1][:5])
            given = Side(str(blamed), sent, Note.unpack(told[1][5]), member == self.me != witness)
            return build_error(self.where, Finding("mismatch", story("a message", given, taken)))
        if fault in ("lost", "left"):
            own = own or (None if native is None else self.made(native))
            if native is not None and own is not None:
                return self.bereft(fault, member, self.me, own, native.seq)
            return self.bereft(fault, member, witness, call)
        return self.given_up(witness, str(call), reason, self._absent(call))

    def _absent(self, call: Call) -> str:
        """Say who has not done its part of a message."""
        if call.root is None or call.root == ANY:
            stopped = [f"{m} ({m.state})" for m in self.members if m.index != self.me and m.stopped]
            return "; ".join(["no other member has sent what fits it", *stopped])
        peer = self.members[call.root]
        did = "has not received it" if call.collective == "send" else "has not sent it"
        found = self.group.last_call(call.root)
        last = f"; its last collective was {self.read(found[1])} #{found[0]}" if found else ""
        waits = self.message_of(call.root)
        both = call.collective == "send" and waits == f"waits in a send for {self.members[self.me]}"
        mend = "; of two that send to each other, one must receive first" if both else ""
        return f"{peer} {did}{waits and f', and {waits}'} ({peer.state}{last}){mend}"

    def _posted(self, work: _native.Work) -> Call:
        """Read the message of a work of this member's."""
        collective, _, dtype, _, peer, count = work.call
        return self._message(collective, dtype, peer, count, work.tag)

    def _message(self, collective: int, dtype: int, peer: int, count: int, tag: int) -> Call:
        return Call(COLLECTIVES[collective], None, DTYPES[dtype], count, peer, self.name, tag=tag)
