"""Plans of the tcp transport: the native plan, in words and numbers."""

from __future__ import annotations

from allreduce import _native
from allreduce.comm.call import MESSAGES, Call, item_bytes
from allreduce.comm.choice.choosing import Choice, Choices
from allreduce.comm.plan import Placed, Plan, Topology, in_units
from allreduce.comm.segments import segments
from allreduce.comm.tcp import calls
from allreduce.events import counted

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_AGREE = "post the call to all, and wait until all have posted the same"


def plan_tcp(call: Call, topology: Topology, choices: Choices, placed: Placed) -> Plan:
    """Plan a call between members on any hosts."""
    choice = calls.choose(call, topology.size, choices)
    if choice.algorithm == "small":
        return _small(call, topology.rank, topology.size, choice)
    item, me = item_bytes(call.dtype), topology.rank
    words = calls.words(call, topology.size, choices)
    chunk, window, stages = _native.tcp_plan(words, me, topology.size)
    message = call.collective in MESSAGES
    steps = ["offer it, and wait until its receiver asks for it" if message else _AGREE]
    read = written = sent = staging = 0
    for sources, elements, to, reduced, stored, staged in stages:
        if not elements:
            continue
        nbytes = elements * item
        number = -(-elements // chunk)
        steps.append(_words(nbytes, counted(number, "chunk"), sources, to, reduced, stored))
        sent += nbytes * len(to)
        written += nbytes * (len(sources) + reduced)
        read += nbytes * (len(to) + (len(sources) + 1) * reduced)
        if not sources and stored and not placed.in_place:  # the own part is copied
            read += nbytes
            written += nbytes
        if staged:
            staging += min(number, window) * min(chunk, elements) * item * len(sources)
    return Plan(
        *(str(call), "tcp", choice.algorithm, tuple(steps)),
        chunk=chunk * item,
        read=read,
        written=written,
        sent=sent,
        staging=staging,
    )


def _words(
    nbytes: int, number: str, sources: list[int], to: list[int], reduced: bool, stored: bool
) -> str:
    amount = f"{in_units(nbytes)} in {number}"
    doing = [f"receive {amount} from {_members(sources)}"] if sources else [f"take {amount}"]
    if reduced:
        doing.append("reduce them with the own")
    if stored:
        doing.append("store them in the output")
    if to:
        doing.append(f"send them to {_members(to)}")
    return ", ".join(doing)


def _members(members: list[int]) -> str:
    return f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"


def _small(call: Call, me: int, size: int, choice: Choice) -> Plan:
    """Plan a call whose data go with its posts, or a small message."""
    item = item_bytes(call.dtype)
    if call.collective in MESSAGES:
        sending = call.collective == "send"
        steps = ["send the message at once" if sending else "take a message that has come"]
        sent = got = moved = call.count
        sent, got = (call.count, 0) if sending else (0, call.count)
    else:
        moves = segments(call, size)
        others = [member for member in range(size) if member != me]
        reaches = [to for to in others if call.collective != "reduce" or to == call.root]
        gets = call.collective != "reduce" or me == call.root
        sent = sum(moves.given(me, to) for to in reaches)
        got = sum(moves.taken(me, source) for source in others) if gets else 0
        steps = ["post the call to all, with what each gets" if sent else "post the call to all"]
        steps.append("wait until all have posted the same")
        moved = got + (moves.taken(me, me) if gets else 0)
        if moved and call.collective in _REDUCING:
            steps.append(f"reduce what came with all {size} posts")
        elif moved:
            steps.append("copy out what came with the posts")
    if size == 1:
        steps, sent, got, moved = ["copy the input to the output"], 0, 0, segments(call, 1).input(0)
    one = call.collective in _REDUCING and size > 1
    out = segments(call, size).given(me, me) if one and moved else moved
    return Plan(
        *(str(call), "tcp", choice.algorithm, tuple(steps)),
        read=(sent + moved) * item,
        written=(sent + out) * item,
        sent=sent * item,
        staging=(sent + got) * item,
    )
