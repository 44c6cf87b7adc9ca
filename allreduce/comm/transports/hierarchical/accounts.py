"""What a member's calls cost, as planned and as counted."""

from __future__ import annotations

from collections.abc import Mapping

from allreduce.comm.calls.call import Call
from allreduce.comm.calls.plan import Plan
from allreduce.comm.transports.hierarchical.control_channel import Ledger
from allreduce.comm.transports.hierarchical.layout import Layout
from allreduce.comm.transports.hierarchical.levels import Level
from allreduce.comm.transports.hierarchical.plan import crossing, plan_hierarchical


class Accounts:
    """One member's; its arguments are HierarchicalTransport's."""

    def __init__(self, ledger: Ledger, levels: Mapping[str, Level], layout: Layout) -> None:
        self._ledger, self._levels, self._layout = ledger, levels, layout

    def plan(self, call: Call) -> Plan:
        return plan_hierarchical(call, self._layout, self._ledger.index, self._part)

    def crossing(self, call: Call) -> int | None:
        """Return the bytes that this member's part of a call sends to other hosts, if known."""
        return crossing(call, self._layout, self._ledger.index, self._part)

    def crossed(self) -> int | None:
        """Return the bytes of data that this member has sent to other hosts, if all are counted."""
        mates = self._layout.hosts[self._layout.places[self._ledger.index][0]]
        sent = self._ledger.payload_bytes()
        total = sum(count for member, count in enumerate(sent) if member not in mates)
        for name in ("across", "every"):
            if name in self._levels:
                carried = self._levels[name].transport.payload_bytes()
                if carried is None:
                    return None
                total += sum(carried)
        return total

    def _part(self, level: str, call: Call) -> Plan:
        if level in self._levels:
            return self._levels[level].transport.plan(call, None, None)
        return self._ledger.plan(call, None, None)
