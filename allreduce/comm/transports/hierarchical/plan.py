"""Plans of the hierarchical transport: its chains in words, and the bytes planned and sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from allreduce.comm.calls.call import MESSAGES, Call, item_bytes
from allreduce.comm.calls.plan import Plan, in_units
from allreduce.comm.transports.hierarchical.chains import make_chains
from allreduce.comm.transports.hierarchical.control_channel import ControlChannel
from allreduce.comm.transports.hierarchical.layout import Layout
from allreduce.comm.transports.hierarchical.levels import Level
from allreduce.comm.transports.hierarchical.steps import MEMORY, Chain, Copies, Division, Step
from allreduce.events import counted

Plans = Callable[[str, Call], Plan]  # of a level's call
_WHERE = {
    "in": "within the host",
    "across": "between hosts, in this member's lane",
    "out": "within the host",
    "every": "with all members",
}
_AGREE = "post the call to all, and write no output before all have posted the same"


def plan_hierarchical(call: Call, layout: Layout, me: int, plans: Plans) -> Plan:
    """Plan a call for one member.

    Args:
        call: The caller's call.
        layout: The members of each host.
        me: The member.
        plans: Plans the calls of this member's levels.
    """
    if call.collective in MESSAGES:
        part = plans("every", call)
        return Plan(str(call), "hierarchical", part.algorithm, part.steps, sent=part.sent)
    chains = make_chains(call, layout, me)
    shape = f"{counted(len(layout.hosts), 'host')}, {counted(layout.lanes, 'lane')}"
    steps = [_AGREE, *(_words(step, chains[0]) for step in (chains[0].steps if chains else ()))]
    if len(chains) > 1:
        steps.append(f"so for each of {len(chains)} chunks, whose steps overlap")
    parts = [
        [plans(step.level, step.call) for step in chain.steps if isinstance(step, Step)]
        for chain in chains
    ]
    flat = [part for chain in parts for part in chain]
    copied = sum(_copied(chain) for chain in chains)
    return Plan(
        *(str(call), "hierarchical", shape, tuple(steps)),
        read=_sum([part.read for part in flat], copied),
        written=_sum([part.written for part in flat], copied),
        sent=_sum([part.sent for part in flat if part.transport != "shared"], 0),
        staging=_working_memory(chains),
        parts=tuple(parts[0]) if parts else (),
    )


def crossing(call: Call, layout: Layout, me: int, plans: Plans) -> int | None:
    """Return the bytes of data that one member sends to other hosts in a call, if known."""
    if call.collective in MESSAGES:
        abroad = call.collective == "send" and call.root not in _mates(layout, me)
        return call.count * item_bytes(call.dtype) if abroad else 0
    sent: list[int | None] = []
    for chain in make_chains(call, layout, me):
        for step in chain.steps:
            if isinstance(step, Step) and step.level == "across":
                sent.append(plans("across", step.call).sent)
            elif isinstance(step, Step) and step.level == "every":
                sent.append(_abroad(step.call, layout, me))
    return _sum(sent, 0)


def _abroad(call: Call, layout: Layout, me: int) -> int:
    """Return the bytes of an all_to_all that go to other hosts."""
    counts = call.counts or (call.count,) * layout.size
    mates = _mates(layout, me)
    elements = sum(count for member, count in enumerate(counts) if member not in mates)
    return elements * item_bytes(call.dtype)


def _mates(layout: Layout, me: int) -> Sequence[int]:
    """Return the members on a member's host."""
    return layout.hosts[layout.places[me][0]]


def _words(step: Step | Copies | Division, chain: Chain) -> str:
    if isinstance(step, Step):
        return f"{_WHERE[step.level]}: {step.call}"
    if isinstance(step, Division):
        return f"divide the sum by {step.by}"
    count = sum(source.count for source, _ in step.pairs)
    return f"copy {in_units(count * item_bytes(chain.dtype))} into order"


def _copied(chain: Chain) -> int:
    copies = [step for step in chain.steps if isinstance(step, Copies)]
    count = sum(source.count for step in copies for source, _ in step.pairs)
    return count * item_bytes(chain.dtype)


def _working_memory(chains: tuple[Chain, ...]) -> int:
    """Return the working memory of the chains in flight, in bytes."""
    each = [chain.nbytes for chain in chains]
    return min(sum(each), max(MEMORY, *each)) if each else 0


def _sum(known: list[int | None], more: int) -> int | None:
    """Add bytes if all are known."""
    return None if None in known else sum(one or 0 for one in known) + more


class Accounts:
    """Plans one member's calls and counts its bytes."""

    def __init__(
        self, control: ControlChannel, levels: Mapping[str, Level], layout: Layout
    ) -> None:
        self._control, self._levels, self._layout = control, levels, layout

    def plan(self, call: Call) -> Plan:
        return plan_hierarchical(call, self._layout, self._control.index, self._part)

    def crossing(self, call: Call) -> int | None:
        """Return the bytes that this member sends to other hosts in a call, if known."""
        return crossing(call, self._layout, self._control.index, self._part)

    def crossed(self) -> int | None:
        """Return the bytes of data that this member has sent to other hosts, if counted."""
        mates = self._layout.hosts[self._layout.places[self._control.index][0]]
        sent = self._control.payload_bytes()
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
        return self._control.plan(call, None, None)
