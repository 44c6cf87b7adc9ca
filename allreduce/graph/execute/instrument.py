"""Check the values of each instruction for NaN: `ar.config.enable_check_numerics()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.debug import numerics
from allreduce.graph.execute.frame import Frame
from allreduce.reduction import slice_of


def watched(frame: Frame, node: Node, step: Callable[[], None]) -> Callable[[], None]:
    """Return `step` so that it checks its value; collectives are checked when they end."""
    if node.op == "update_bucket":
        look = look_at_parameters
    elif lookup(node.op).kind == "compute" and lookup(node.op).view is None:
        look = look_at
    else:
        return step

    def run_and_look() -> None:
        step()
        look(frame, node)

    return run_and_look


def look_at(frame: Frame, node: Node) -> None:
    """Raise an error if the value of an operation or an ended collective is not finite.

    Raises:
        NumericsError: The message names the operation, or the variable of a gradient.
    """
    if node.op == "all_reduce_norm":  # of sums that were looked at
        return
    if "bucket" not in node.attrs:
        inputs = [frame.values[i] for i in node.inputs]
        numerics.check(node.op, node.source, frame.values[node.id], inputs, _when(frame))
        return
    if node.op != "all_gather_bucket":
        for name, gradient in _sums(frame, node):
            what = f"the sum of all replicas' gradients of {name!r}"
            numerics.check(what, node.source, gradient, [], _when(frame))
    if node.op in ("all_gather_bucket", "update_slices"):
        look_at_parameters(frame, node)


def _sums(frame: Frame, node: Node) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names of a bucket's variables, and the parts whose sums this replica has."""
    arena, bucket = frame.arena(node), node.attrs["bucket"]
    sums, own, first = arena.gradients, slice(bucket.start, bucket.stop), 0
    if node.op != "all_reduce_bucket":
        own = slice_of(bucket, arena.layout, frame.communicator.size, frame.communicator.rank)
    if node.op == "reduce_scatter_bucket":  # these lie by themselves
        sums, first = arena.sums[bucket.index], own.start
    for span in arena.layout.spans[bucket.first : bucket.last]:
        low, high = max(own.start, span.start), min(own.stop, span.start + span.size)
        if low < high:
            part = sums[low - first : high - first]
            yield span.name, part.reshape(span.shape) if part.size == span.size else part


def look_at_parameters(frame: Frame, node: Node) -> None:
    """Raise an error if parameters are not finite after an update.

    Raises:
        NumericsError: The message names the variable.
    """
    for name, gradient, parameters in _variables(frame, node):
        what = f"the update of {name!r}"
        numerics.check(what, node.source, parameters, [gradient], _when(frame))


def _variables(frame: Frame, node: Node) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the name, gradient and value of each variable of a bucket."""
    arena, bucket = frame.arena(node), node.attrs["bucket"]
    for place in range(bucket.first, bucket.last):
        name = arena.layout.spans[place].name
        yield name, arena.view(arena.gradients, place), arena.view(arena.parameters, place)


def _when(frame: Frame) -> str:
    return f"replica {frame.replica.id}, step {frame.info.step}"
