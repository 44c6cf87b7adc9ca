"""Operators: `apply` appends a node inside `ar.function`, and runs the kernel outside of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.devices import logical_devices, on_host, options
from allreduce.devices.names import DeviceName
from allreduce.errors import ShapeError, UnsupportedError, UsageError, raised_here, reworded
from allreduce.graph.core import seed
from allreduce.graph.core.node import Node
from allreduce.graph.core.numerics import run_now
from allreduce.graph.core.op_table import Attrs, Op, lookup
from allreduce.graph.core.scope import choose, current_part, surroundings, users_line
from allreduce.graph.core.spec import Dim, Spec, concrete
from allreduce.graph.core.tensor import ConcreteTensor, EagerTensor, Tensor, TracedTensor
from allreduce.graph.placement.placement import PlacementRow, report, requested
from allreduce.graph.trace.trace import HOST, current_trace


def as_tensor(value: Any, dtype: Any = None) -> Tensor:
    """Convert an operator's input: a tensor, variable, array, number or nested list."""
    if isinstance(value, ConcreteTensor):
        return value if current_trace() is None else _constant(value.value)
    if isinstance(value, EagerTensor) and value.trace is not current_trace():
        return _constant(value.value)  # kept from a step that has ended
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__tensor__"):
        result = value.__tensor__()
        assert isinstance(result, Tensor)
        return result
    if isinstance(value, Dim):
        raise value.unknown()
    try:
        array = np.asarray(on_host(value, users_line), dtype=dtype)
    except ValueError as error:  # such as lists of several lengths
        if not raised_here(error):
            raise
        kind = type(value).__name__
        raise UsageError(f"{users_line()}: cannot make a tensor of a {kind}: {error}") from None
    if array.dtype == object or array.dtype.kind in "USOMm":
        kind, shape = type(value).__name__, array.shape
        what = (
            f"{kind} of shape {shape} and dtype {array.dtype}" if shape else f"{kind} {value!r:.60}"
        )
        raise UsageError(
            f"{users_line()}: cannot make a tensor of {what}; it takes numbers (rows of different "
            "lengths become objects: pad them; encode strings as integers)"
        )
    return _constant(array)


def _constant(array: np.ndarray) -> Tensor:
    trace = current_trace()
    if trace is None:
        return ConcreteTensor(array, current_place("constant", array))
    # A copy, because the caller may change the array after tracing.
    value = array.copy()
    return trace.add("constant", (), {"value": value}, Spec(value.shape, value.dtype))


def current_place(op: str, value: np.ndarray) -> DeviceName:
    """Return the device for an eager operator's value; logged if placement is logged."""
    if not surroundings() and not options.current().log_device_placement:
        return HOST
    node = choose(Node(0, op, (), {}, Spec(value.shape, value.dtype), source=users_line()))
    device, reason = HOST, "the first device"
    if node.device is not None:
        available = [device.name for device in logical_devices()]
        device, reason = requested(node, node.device, HOST, available)
    report([PlacementRow(op, device, reason, node.source)], {})
    return device


def apply(name: str, *inputs: Any, **attrs: Any) -> Tensor:
    """Record one operator in a trace, or run it at once outside of functions."""
    op = lookup(name)
    tensors = [as_tensor(value) for value in inputs]
    if op.is_product and options.current().mixed_precision is not None:
        tensors = [_shortened(tensor) for tensor in tensors]
        attrs = {**attrs, "short": True}  # such operands need no wider multiplication
    try:
        spec = op.shape([tensor.spec for tensor in tensors], attrs)
    except ShapeError as error:
        named = reworded(error, f"{users_line()}: {name}: {error}")
        raise named.with_traceback(error.__traceback__) from error.__cause__  # a user's rule
    trace = current_trace()
    if trace is None:
        return _run_now(op, [_concrete(tensor, name) for tensor in tensors], attrs, spec)
    return trace.add(name, [as_traced(tensor) for tensor in tensors], attrs, spec)


def _shortened(tensor: Tensor) -> Tensor:
    """Round a product's operand, unless it has been rounded for another one."""
    if tensor.dtype != np.float32 or _is_short(tensor):
        return tensor
    return apply("round_to_bfloat16", tensor)


def node_of(x: Any) -> Node | None:
    """Return the node that makes a tensor of the current trace; None for anything else."""
    trace = current_trace()
    if trace is None or not isinstance(x, TracedTensor) or x.trace is not trace:
        return None
    return trace.nodes[x.id]


def _is_short(tensor: Tensor) -> bool:
    trace, node = current_trace(), node_of(tensor)
    if trace is None or node is None:
        return False
    while lookup(node.op).view is not None:
        node = trace.nodes[node.inputs[0]]
    return node.op == "round_to_bfloat16"


def as_traced(tensor: Tensor) -> TracedTensor:
    """Return a tensor as one of the current trace, which an operator has made it."""
    assert isinstance(tensor, TracedTensor)
    return tensor


def _concrete(tensor: Tensor, name: str) -> ConcreteTensor:
    if isinstance(tensor, ConcreteTensor):
        return tensor
    raise UsageError(
        f"{users_line()}: {name} got a tensor of a traced function after its trace had ended; "
        "return the tensor from the function instead of keeping it"
    )


def _run_now(op: Op, inputs: Sequence[ConcreteTensor], attrs: Attrs, spec: Spec) -> ConcreteTensor:
    if op.view is not None:
        value = op.view(inputs[0].value, attrs)
        return ConcreteTensor(value, current_place(op.name, value))
    if op.cpu is None:
        raise UnsupportedError(f"{users_line()}: {op.name} works inside ar.function only")
    value = run_now(
        op,
        [tensor.value for tensor in inputs],
        attrs,
        (concrete(spec.shape, 0), spec.dtype),
        lambda: (users_line(), current_part(), "outside of steps"),
    )
    return ConcreteTensor(value, current_place(op.name, value))


_eager_draws = itertools.count()
_drawn_since = 0


def runtime(name: str) -> Tensor:
    """Return a number that changes per step; outside of functions, that of one replica at row 0."""
    trace = current_trace()
    if trace is not None:
        return trace.runtime(name)
    value = np.asarray(0, np.int64)
    return ConcreteTensor(value, current_place("runtime", value))


def next_draw() -> int:
    """Number a random operator: by its place in a trace, or by calls since `set_seed`."""
    global _eager_draws, _drawn_since
    trace = current_trace()
    if trace is not None:
        return trace.next_draw()
    if _drawn_since != seed.times_set():
        _drawn_since, _eager_draws = seed.times_set(), itertools.count()
    return next(_eager_draws)
