"""Plans of the tcp transport: the native plan, in words and numbers."""

from __future__ import annotations

from allreduce import _native
from allreduce.cluster.store import ranks_text
from allreduce.comm.calls.call import MESSAGES, REDUCING, Call, item_bytes
from allreduce.comm.calls.plan import Plan, format_bytes
from allreduce.comm.selection.choosing import Choices
from allreduce.comm.selection.table import Row
from allreduce.comm.transports.tcp import calls
from allreduce.events import counted

_AGREE = "post the call to all, and wait until all have posted the same"


def plan_tcp(call: Call, me: int, size: int, choices: Choices) -> Plan:
    """Plan a call between members on any hosts."""
    choice = calls.choose(call, size, choices)
    words = calls.words(call, size, choices)
    if choice.algorithm == "eager":
        return _small(call, me, size, choice, words)
    item = item_bytes(call.dtype)
    chunk, window, stages = _native.tcp_plan(words, me, size)
    message = call.collective in MESSAGES
    steps = ["offer it, and wait until its receiver asks for it" if message else _AGREE]
    sent = staging = 0
    for sources, elements, to, reduced, stored, staged in stages:
        if not elements:
            continue
        nbytes = elements * item
        number = -(-elements // chunk)
        steps.append(_words(nbytes, counted(number, "chunk"), sources, to, reduced, stored))
        sent += nbytes * len(to)
        if staged:
            staging += min(number, window) * min(chunk, elements) * item * len(sources)
    return Plan(
        *(str(call), "tcp", choice.algorithm, tuple(steps)),
        chunk=chunk * item,
        sent=sent,
        staging=staging,
    )


def _words(
    nbytes: int, number: str, sources: list[int], to: list[int], reduced: bool, stored: bool
) -> str:
    amount = f"{format_bytes(nbytes)} in {number}"
    doing = [f"receive {amount} from {ranks_text(sources)}"] if sources else [f"take {amount}"]
    if reduced:
        doing.append("reduce them with the own")
    if stored:
        doing.append("store them in the output")
    if to:
        doing.append(f"send them to {ranks_text(to)}")
    return ", ".join(doing)


def _small(call: Call, me: int, size: int, choice: Row, words: tuple[object, ...]) -> Plan:
    """Plan a call whose data go with its posts, or a small message."""
    if call.collective in MESSAGES:
        sending = call.collective == "send"
        steps = ["send the message at once" if sending else "take a message that has come"]
        sent, got = (call.count, 0) if sending else (0, call.count)
    else:
        sent, got, own = _native.tcp_eager_plan(words, me, size)
        moved = got + own
        steps = ["post the call to all, with their data" if sent else "post the call to all"]
        steps.append("wait until all have posted the same")
        if size == 1:
            steps = ["copy the input to the output"]
        elif moved and call.collective in REDUCING:
            steps.append(f"reduce the data of all {size} posts")
        elif moved:
            steps.append("copy out the data of the posts")
    item = item_bytes(call.dtype)
    return Plan(
        *(str(call), "tcp", choice.algorithm, tuple(steps)),
        sent=sent * item,
        staging=(sent + got) * item,
    )
