"""Turn a call of the hierarchical transport into chains of steps; pure functions.

Every level of every member gets its steps in the order of calls, chains and steps. That order is
the same on all members of the level, so no two can wait for each other's calls.
"""

from __future__ import annotations

from functools import lru_cache

from allreduce import _native
from allreduce.comm.calls.call import Call, native_words, starts
from allreduce.comm.transports.hierarchical import shares, whole
from allreduce.comm.transports.hierarchical.layout import Layout
from allreduce.comm.transports.hierarchical.steps import (
    Builder,
    Chain,
    Part,
    Step,
    chunks,
    cut,
)

_WHOLE = {
    "all_reduce": whole.all_reduce,
    "reduce": whole.reduce,
    "broadcast": whole.broadcast,
}
_SHARES = {"reduce_scatter": shares.reduce_scatter, "all_gather": shares.all_gather}
# Each pair of members exchanges different data, which no detour reduces.
_PAIRWISE = ("all_to_all", "gather", "scatter")


@lru_cache(maxsize=256)
def make_chains(call: Call, layout: Layout, me: int) -> tuple[Chain, ...]:
    """Plan a call for one member; the chains of different chunks are independent."""
    if call.collective == "barrier":
        return ()  # posting the call is enough
    if level := _only_level(call, layout):
        return (_alone(call, layout, me, level),)
    if call.collective in _WHOLE:
        made = []
        for start, stop in cut(call.count, chunks(call.count, call.dtype)):
            build = Builder(call, layout, me)
            _WHOLE[call.collective](build, Part("out", start, stop))
            made.append(build.chain())
        return tuple(made)
    return _of_shares(call, layout, me)


def _only_level(call: Call, layout: Layout) -> str | None:
    """Return the level that carries the entire call, if there is one."""
    if len(layout.hosts) == 1:
        return "in"
    if call.collective in _PAIRWISE:
        return "every"
    return "across" if layout.size == len(layout.hosts) else None


def _alone(call: Call, layout: Layout, me: int, level: str) -> Chain:
    inputs, outputs = _native.call_elements(native_words(call), me, layout.size)
    source: Part | None = Part("x", 0, inputs)
    target: Part | None = Part("out", 0, outputs)
    if me != call.root:
        source = {"scatter": None, "broadcast": target}.get(call.collective, source)
        target = None if call.collective in ("reduce", "gather") else target
    return Chain((Step(level, call, source, target),), call.dtype, {})


def _of_shares(call: Call, layout: Layout, me: int) -> tuple[Chain, ...]:
    counts = call.shares(layout.size)
    pieces = chunks(sum(counts), call.dtype)
    joined, single = ("x", "out") if call.collective == "reduce_scatter" else ("out", "x")
    made = []
    for piece in range(pieces):
        build = Builder(call, layout, me)
        shares = _piece(joined, counts, piece, pieces)
        own = Part(single, *cut(counts[me], pieces)[piece])
        _SHARES[call.collective](build, shares, own)
        made.append(build.chain())
    return tuple(made)


def _piece(array: str, counts: tuple[int, ...], piece: int, pieces: int) -> list[Part]:
    """Return one piece of every member's share."""
    found = []
    for start, count in zip(starts(counts), counts, strict=True):
        low, high = cut(count, pieces)[piece]
        found.append(Part(array, start + low, start + high))
    return found
