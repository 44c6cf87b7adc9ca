"""Plans of the hierarchical transport: its chains in words."""

from __future__ import annotations

from collections.abc import Callable

from allreduce.comm.calls.call import MESSAGES, Call, item_bytes
from allreduce.comm.calls.plan import Plan, format_bytes
from allreduce.comm.transports.hierarchical.chains import make_chains
from allreduce.comm.transports.hierarchical.layout import Layout
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
    """Plan a call for one member."""
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
    sent = [part.sent for chain in parts for part in chain if part.transport != "shared"]
    return Plan(
        *(str(call), "hierarchical", shape, tuple(steps)),
        sent=None if None in sent else sum(one or 0 for one in sent),
        staging=_working_memory(chains),
        parts=tuple(parts[0]) if parts else (),
    )


def _words(step: Step | Copies | Division, chain: Chain) -> str:
    if isinstance(step, Step):
        return f"{_WHERE[step.level]}: {step.call}"
    if isinstance(step, Division):
        return f"divide the sum by {step.by}"
    count = sum(source.count for source, _ in step.pairs)
    return f"copy {format_bytes(count * item_bytes(chain.dtype))} into order"


def _working_memory(chains: tuple[Chain, ...]) -> int:
    """Return the working memory of the chains in flight, in bytes."""
    each = [chain.nbytes for chain in chains]
    return min(sum(each), max(MEMORY, *each)) if each else 0
