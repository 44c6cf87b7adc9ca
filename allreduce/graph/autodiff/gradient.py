"""Reverse-mode differentiation: gradients are further nodes of the same trace.

Source: Griewank and Walther, Evaluating Derivatives (2nd ed., SIAM 2008), section 3.2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.errors import UnsupportedError, UsageError
from allreduce.graph.core.node import GRADIENT, LOSS, Node
from allreduce.graph.core.op_table import cut, lookup
from allreduce.graph.core.scope import SameDeviceAs, part, users_line, within
from allreduce.graph.core.tensor import Tensor, TracedTensor
from allreduce.graph.ops import functions
from allreduce.graph.trace.dispatch import as_tensor, as_traced
from allreduce.graph.trace.trace import Trace, current_trace
from allreduce.graph.trace.variable import Variable


def backward(output: Any, inputs: Sequence[Any], seed: Any) -> list[Tensor]:
    """Append the nodes that compute the gradient of `sum(seed * output)`.

    Args:
        output: A tensor of floats.
        inputs: Variables or tensors of the same trace, of floats.
        seed: A tensor that broadcasts to the output's shape.

    Returns:
        One tensor per input, of its shape and dtype; zeros if the output does not depend on it.

    Raises:
        UsageError: The call is outside of `ar.function`, an input has no gradient, or the output
            depends on no input.
        UnsupportedError: An operator in between has no gradient; the message names it.
    """
    trace = current_trace()
    if trace is None:
        raise UsageError(f"{users_line()}: gradients are computed inside ar.function")
    _check(inputs)
    end = trace.own(as_traced(as_tensor(output)), "gradients")
    starts = [_values(trace, value) for value in inputs]
    found = _flow(trace, {end.id: functions.broadcast_to(seed, end.shape, dtype=end.dtype)}, starts)
    if found is None:
        raise _unreached(trace, {value.id for values in starts for value in values}, end.id)
    return found


def _check(inputs: Sequence[Any]) -> None:
    if not isinstance(inputs, list | tuple):
        raise UsageError(
            f"{users_line()}: expected a list of variables or tensors, got "
            f"{type(inputs).__name__}; a single one goes into a list, too: [x]"
        )
    if not inputs:
        raise UsageError(f"{users_line()}: no variables were given; has the model been built?")
    for value in inputs:
        if not isinstance(value, TracedTensor | Variable):
            raise UsageError(
                f"{users_line()}: there are gradients by variables and by tensors of the step, not "
                f"by {type(value).__name__} {value!r:.60}; make it an ar.Variable, or an argument "
                "of the function"
            )
        if not np.issubdtype(value.dtype, np.floating):
            what = f"variable {value.name!r}" if isinstance(value, Variable) else repr(value)
            raise UsageError(
                f"{users_line()}: {what} is {value.dtype}; there are gradients by floats only"
            )


def _unreached(trace: Trace, starts: set[int], end: int) -> UsageError:
    """Explain why no gradient flows back: name the operator that cuts the path, if any."""
    needed = {end}
    for node in reversed(trace.nodes[: end + 1]):
        if node.id in needed:
            needed.update(node.inputs)
    reached = set(starts)
    for node in trace.nodes[: end + 1]:
        if node.id not in needed or not reached.intersection(node.inputs):
            continue
        if not _is_smooth(node):
            return UsageError(
                f"{users_line()}: no gradient flows from the loss to any of the variables: "
                f"operator {node.op!r} at {node.source} passes none on"
            )
        reached.add(node.id)
    return UsageError(
        f"{users_line()}: the loss does not depend on any of the variables; were they made by "
        "another model?"
    )


def differentiate(
    ends: Sequence[tuple[TracedTensor, Tensor]], starts: Sequence[TracedTensor]
) -> list[Tensor]:
    """Append the nodes that compute the gradient of the sum of all `end * seed`.

    Args:
        ends: Tensors of the current trace, and their seeds of the same shape.
        starts: Tensors of the same trace.

    Returns:
        One tensor per start; zeros if no end depends on it.
    """
    trace = current_trace()
    assert trace is not None, "a trace differentiates"
    seeds: dict[int, Tensor] = {}
    for end, seed in ends:
        seeds[end.id] = functions.add(seeds[end.id], seed) if end.id in seeds else seed
    found = _flow(trace, seeds, [(start,) for start in starts])
    return [functions.zeros(x.shape, x.dtype) for x in starts] if found is None else found


def _flow(
    trace: Trace, pending: dict[int, Tensor], starts: Sequence[Sequence[TracedTensor]]
) -> list[Tensor] | None:
    """Follow gradients back from where they are `pending`; None if no start is ever reached."""
    last = max(pending, default=-1)
    between = _between(trace, {start.id for values in starts for start in values}, set(pending))
    if between.isdisjoint(pending):
        return None
    final: dict[int, Tensor] = {}
    for node in reversed(trace.nodes[: last + 1]):
        if node.id not in pending or node.id not in between:
            continue
        gradient = pending.pop(node.id)
        final[node.id] = gradient
        _propagate(trace, node, gradient, between, pending)
    return [
        _sum([final[value.id] for value in values if value.id in final], values[0])
        for values in starts
    ]


def _values(trace: Trace, value: Any) -> tuple[TracedTensor, ...]:
    """List the tensors that stand for an input: all that were read of a variable, or the tensor."""
    tensor = trace.own(as_traced(as_tensor(value)), "gradients")
    return trace.reads(value) or (tensor,)


def _sum(parts: Sequence[Tensor], like: TracedTensor) -> Tensor:
    if not parts:
        return functions.zeros(like.shape, dtype=like.dtype)
    return functools.reduce(functions.add, parts)


def _between(trace: Trace, starts: set[int], ends: set[int]) -> set[int]:
    """Find the float nodes on some path from `starts` to `ends`."""
    nodes = trace.nodes[: max(ends, default=-1) + 1]
    reached = set(starts)
    for node in nodes:
        if reached.intersection(node.inputs) and _is_smooth(node):
            reached.add(node.id)
    needed = set(ends)
    for node in reversed(nodes):
        if node.id in needed:
            needed.update(node.inputs)
    return reached & needed


def _is_smooth(node: Node) -> bool:
    return np.issubdtype(node.spec.dtype, np.floating) and lookup(node.op).gradient is not cut


def _propagate(
    trace: Trace, node: Node, gradient: Tensor, between: set[int], pending: dict[int, Tensor]
) -> None:
    wanted = [place for place, i in enumerate(node.inputs) if i in between]
    if not wanted:
        return
    op = lookup(node.op)
    if op.gradient is None:
        raise _lacking(node, wanted[0])
    inputs = [trace.tensor(i) for i in node.inputs]
    output = trace.tensor(node.id)
    with within(SameDeviceAs(id(trace), node.id)), part(_gradient_of(node)):
        parts = op.gradient(gradient, output, inputs, node.attrs)
    assert len(parts) == len(inputs), node
    for place in wanted:
        source, found = inputs[place], parts[place]
        if found is None:
            raise _lacking(node, place)
        before = pending.get(source.id)
        if before is not None:
            of = trace.nodes[source.id]
            with within(SameDeviceAs(id(trace), source.id)), part(_gradient_of(of)):
                found = before + found
        pending[source.id] = found


def _gradient_of(node: Node) -> str:
    return f"{GRADIENT}{node.part}" if node.part else LOSS


def _lacking(node: Node, place: int) -> UnsupportedError:
    return UnsupportedError(
        f"{node.source}: operator {node.op!r} has no gradient for its argument {place}, and the "
        "loss depends on a variable through it"
    )
