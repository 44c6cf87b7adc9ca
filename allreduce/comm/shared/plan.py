"""Plans of the shared transport: what its ways do (small.cpp, direct.cpp …), counted."""

from __future__ import annotations

from dataclasses import dataclass

from allreduce import _native
from allreduce.comm.call import MESSAGES, Call, item_bytes
from allreduce.comm.choice.choosing import Choice, Choices
from allreduce.comm.plan import Placed, Plan, Topology
from allreduce.comm.segments import segments, slice_of
from allreduce.events import counted

_IN_RINGS = ("all_reduce", "reduce")
_REDUCING = (*_IN_RINGS, "reduce_scatter")
_PERSONAL = ("reduce_scatter", "scatter", "all_to_all")
_MANY_READERS = ("all_gather", "broadcast")
_LINE = 64


@dataclass
class _Moved:
    """Steps, and elements that they read and write."""

    steps: list[str]
    read: int = 0
    written: int = 0

    def add(self, step: str, read: int, written: int) -> None:
        """Count a step, if it moves anything."""
        if read or written:
            self.steps.append(step)
            self.read += read
            self.written += written


def plan_shared(call: Call, topology: Topology, choices: Choices, placed: Placed) -> Plan:
    """Plan a call between threads and processes of one host."""
    me, size, item = topology.rank, topology.size, item_bytes(call.dtype)
    if call.collective in MESSAGES:
        return _message(call, placed)
    moved = _Moved([])
    choice = _choose(call, size, choices, placed, item)
    if size == 1:
        own = 0 if placed.in_place else segments(call, 1).input(0)
        moved.add("copy the input to the output", own, own)
        choice, staging = Choice("small"), 0
    elif choice.algorithm == "small":
        _small(moved, call, me, size)
        staging = _native.SLOT_BYTES
    elif choice.algorithm == "direct":
        _direct(moved, call, me, size, item, placed, choice)
        staging = 0
    elif choice.algorithm == "pulled":
        _pulled(moved, call, me, size, item, placed, choice)
        staging = 0
    elif choice.algorithm == "exchanged":
        _exchanged(moved, call, me, item, placed, choice)
        staging = _native.LAP_BYTES
    else:
        _staged(moved, call, me, size, item, placed, choice)
        staging = _native.RING_BYTES
    return Plan(
        *(str(call), "shared", choice.algorithm, tuple(moved.steps)),
        chunk=choice.chunk,
        stores=choice.stores,
        read=moved.read * item,
        written=moved.written * item,
        sent=0,
        staging=staging,
    )


def _message(call: Call, placed: Placed) -> Plan:
    """Plan a send or a recv; whether the sender's memory is symmetric, only it knows."""
    nbytes, sending = call.count * item_bytes(call.dtype), call.collective == "send"
    algorithm, chunk, staging = "staged", _native.WINDOW_BYTES, 0
    if nbytes <= _native.EAGER_BYTES:
        algorithm, chunk, staging = "small", 0, nbytes
        steps = ["write it into the receiver's box" if sending else "copy it out of the own box"]
    elif placed.symmetric and sending:
        algorithm, chunk = "direct", 0
        steps = ["offer it, and wait until its receiver has copied it"]
    elif sending:
        staging = min(nbytes, _native.WINDOWS_PER_RECEIVER * chunk)
        steps = ["offer it, and wait until a recv accepts it", "copy it into windows, by chunks"]
    else:
        steps = ["accept the offer", "copy the message out of windows, or of symmetric memory"]
    moved = 0 if algorithm == "direct" else nbytes
    return Plan(
        *(str(call), "shared", algorithm, tuple(steps)),
        chunk=chunk,
        read=moved,
        written=moved,
        sent=0,
        staging=staging,
    )


def _choose(call: Call, size: int, choices: Choices, placed: Placed, item: int) -> Choice:
    if call.collective == "barrier":
        return Choice("small")
    if call.receives is not None:  # what the others give, nobody knows
        return choices.choose(call.collective, None, pulled=False)
    moves = segments(call, size)
    largest = max(moves.input(member) for member in range(size)) * item
    return choices.choose(call.collective, largest, symmetric=placed.symmetric)


def _small(moved: _Moved, call: Call, me: int, size: int) -> None:
    moves = segments(call, size)
    has_input = call.collective not in ("broadcast", "scatter") or me == call.root
    own = moves.input(me) if has_input else 0
    moved.steps.append("post the call, and wait until all have posted the same")
    moved.add("the own input travels with the post", own, own)
    if call.collective in _REDUCING:
        part = 0 if call.collective == "reduce" and me != call.root else moves.given(me, me)
        moved.add(f"reduce what came with all {size} posts", size * part, part)
        return
    got = sum(moves.taken(me, source) for source in range(size))
    moved.add("copy out what came with the posts", got, got)


def _how(choice: Choice, nbytes: int) -> str:
    return ", past the caches" if choice.streams(nbytes) else ""


def _direct(
    moved: _Moved, call: Call, me: int, size: int, item: int, placed: Placed, choice: Choice
) -> None:
    moves = segments(call, size)
    moved.steps.append("post the call, and wait until all have posted the same")
    if call.collective == "all_reduce":
        own = slice_of(call.count, item, size, me)
        moved.add(
            f"reduce the own slice from all {size} inputs straight into all outputs",
            *(size * own, size * own),
        )
    elif call.collective == "reduce_scatter":
        own = moves.given(me, me)
        moved.add(f"reduce the own share from all {size} inputs", size * own, own)
    else:
        others = [moves.taken(me, source) for source in range(size)]
        if placed.in_place:
            others[me] = 0
        how = _how(choice, max(others) * item)
        moved.add(f"copy what is for this rank from the inputs{how}", sum(others), sum(others))
    moved.steps.append("wait until all have done their part")


def _pulled(
    moved: _Moved, call: Call, me: int, size: int, item: int, placed: Placed, choice: Choice
) -> None:
    moves = segments(call, size)
    moved.steps.append("post the call, and wait until all have posted the same")
    got = sum(moves.taken(me, source) for source in range(size) if source != me)
    moved.add("copy what is for this rank out of the others' arrays", got, got)
    own = 0 if placed.in_place else moves.taken(me, me)
    moved.add(f"copy the own part to the output{_how(choice, own * item)}", own, own)
    if any(moves.given(me, to) for to in range(size) if to != me):
        moved.steps.append("wait until the others have copied theirs")


def _exchanged(
    moved: _Moved, call: Call, me: int, item: int, placed: Placed, choice: Choice
) -> None:
    moves = segments(call, 2)
    out, own = moves.given(me, 1 - me), moves.given(me, me)
    parts = [out, own] if call.collective in _REDUCING else [out, own, moves.taken(me, 1 - me)]
    parts += [moves.given(1 - me, 1 - me)]
    number = counted(sum(many for _, many in _pieces(max(parts), choice.chunk // item)), "chunk")
    moved.add(
        f"copy what is for the other one into places that it has filled, {number} in all", out, out
    )
    if call.collective in _REDUCING:
        moved.add("reduce what it has put there with the own input", 2 * own, own)
        return
    got = moves.taken(me, 1 - me)
    moved.add(f"copy what it has put there out{_how(choice, got * item)}", got, got)
    own = 0 if placed.in_place else moves.taken(me, me)
    moved.add(f"copy the own part to the output{_how(choice, own * item)}", own, own)


def _staged(
    moved: _Moved, call: Call, me: int, size: int, item: int, placed: Placed, choice: Choice
) -> None:
    moves = segments(call, size)
    room = choice.chunk
    if call.collective in _PERSONAL:
        room = room // size // _LINE * _LINE
    chunk = room // item
    takes = choice.stores == "ordinary" and not (size > 2 and call.collective in _MANY_READERS)
    longest = max(
        max(moves.given(me, to), moves.taken(me, to), moves.given(to, to)) for to in range(size)
    )
    number = counted(sum(many for _, many in _pieces(longest, chunk)), "chunk")
    if call.collective in _IN_RINGS:
        _in_rings(moved, call, me, size, item, chunk, number)
        return
    if call.collective in _PERSONAL:
        out = sum(moves.given(me, to) for to in range(size) if to != me)
    else:  # the same for all
        out = max(moves.given(me, to) for to in range(size) if to != me)
    moved.add(f"copy what is for others into the own ring, {number} in all", out, out)
    if call.collective == "reduce_scatter":
        own = moves.given(me, me)
        emptied = (size - 1) * own if takes else 0
        moved.add(
            f"reduce the own share of each chunk from all {size} rings", size * own, own + emptied
        )
        return
    got = sum(moves.taken(me, source) for source in range(size) if source != me)
    emptied = got if takes else 0
    how = f"{number} in all{_how(choice, longest * item)}"
    moved.add(f"copy what is for this rank from the rings, {how}", got, got + emptied)
    own = 0 if placed.in_place else moves.taken(me, me)
    moved.add("copy the own part to the output", own, own)


def _pieces(length: int, chunk: int) -> list[tuple[int, int]]:
    """Return how many chunks of each length `length` elements make: (elements, how many)."""
    whole, rest = divmod(length, chunk)
    return [(chunk, whole)] * bool(whole) + [(rest, 1)] * bool(rest)


def _in_rings(
    moved: _Moved, call: Call, me: int, size: int, item: int, chunk: int, number: str
) -> None:
    own = sum(slice_of(n, item, size, me) * many for n, many in _pieces(call.count, chunk))
    others = call.count - own
    keeps = call.collective == "all_reduce" or me == call.root
    moved.add(f"copy the others' slices of {number} into the own ring", others, others)
    moved.add(
        f"reduce the own slice of each chunk from all {size} rings, into all of them",
        *(size * own, (size - 1 + keeps) * own),
    )
    if keeps:
        moved.add("copy the others' results out of the own ring", others, others)
