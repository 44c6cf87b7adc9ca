"""Clip by the norm of all gradients: divide by more than the count if the norm exceeds the limit.

Updates divide by the count anyway, so clipping only reads the gradients. With sharded updates each
member adds up its own slices, and one all-reduce of a single number joins them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from allreduce.graph.core.node import Node
from allreduce.graph.execute.frame import Frame, Step
from allreduce.graph.execute.reports import end
from allreduce.graph.execute.sharded_instructions import own_sums
from allreduce.reduction import Arena

_BLOCK = 1 << 20  # elements that BLAS adds up without losing digits


def gradient_norm(frame: Frame, node: Node) -> Step:
    """Return the function that measures gradients that each replica has as a whole."""
    arena, rule = frame.arena(node), node.attrs["rule"]
    gradients = [arena.gradients[arena.layout.header :]]
    measure = frame.queues.on(node, lambda: _clip(arena, rule.clip_norm, _squares(gradients)))

    def run() -> None:
        measure()

    return run


def all_reduce_norm(frame: Frame, node: Node) -> Step:
    """Return the function that measures the own slices and starts to add up all members'."""
    arena, rule, plan = frame.arena(node), node.attrs["rule"], node.attrs["plan"]
    modes = plan.sharded
    own = [own_sums(frame, node, b, modes[b.index]) for b in plan.buckets if b.index in modes]
    alike = [
        arena.gradients[each.parameters_start : each.stop]
        for each in plan.buckets
        if each.index not in modes
    ]
    total = np.zeros(1)
    start = frame.communicator.all_reduce_init(total, op="sum", out=total)
    frame.received[node.id] = lambda: _clip(arena, rule.clip_norm, total[0] + _squares(alike))

    def run() -> None:
        for i in node.control:
            end(frame, i)
        total[0] = _squares(own)
        frame.works[node.id] = start()

    return run


def _clip(arena: Arena, limit: float, squares: float) -> None:
    norm, count = math.sqrt(squares), float(arena.count[0])
    most = limit * count
    arena.divisor[0] = count * (norm / most) if norm > most > 0 else count


def _squares(arrays: Iterable[np.ndarray]) -> float:
    return sum(float(np.dot(part, part)) for array in arrays for part in _blocks(array))


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(array), _BLOCK):
        yield array[first : first + _BLOCK]
