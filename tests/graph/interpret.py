"""Runs a recorded graph node by node with the operators' kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce.graph.core.node import Graph
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.spec import Spec, concrete
from allreduce.graph.core.tensor import Tensor, TracedTensor
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.subgraph import Body
from allreduce.graph.trace.trace import Trace, recording


def record(function: Callable[..., Sequence[Tensor]], *specs: Spec) -> Graph:
    """Trace a function of as many tensors as there are specs; it returns a sequence of tensors."""
    trace = Trace()
    with recording(trace):
        inputs = [trace.placeholder(spec, f"input {i}") for i, spec in enumerate(specs)]
        outputs = [as_tensor(value) for value in function(*inputs)]
    assert all(isinstance(output, TracedTensor) for output in outputs)
    return trace.finish([output for output in outputs if isinstance(output, TracedTensor)])


def trace_of(fn: Callable[..., Any], *shapes: tuple[Any, ...]) -> Graph:
    """Trace a function of float32 tensors of these shapes; it returns one, or a tuple of them."""
    trace = Trace()
    with recording(trace):
        specs = [Spec(shape, np.dtype(np.float32)) for shape in shapes]
        outputs = fn(*(trace.placeholder(spec, f"x{i}") for i, spec in enumerate(specs)))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(isinstance(each, TracedTensor) for each in outputs)
    return trace.finish(outputs)


def interpret(
    graph: Graph, feeds: Sequence[Any], batch: int = 0, runtime: Mapping[str, int] | None = None
) -> list[np.ndarray]:
    """Compute a graph's outputs."""
    values: list[np.ndarray] = []
    loops: dict[int, list[np.ndarray]] = {}
    fed = dict(zip(graph.inputs, feeds, strict=True))
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            if node.id in fed:
                value = np.asarray(fed[node.id])
            elif node.op == "constant":
                value = node.attrs["value"]
            elif node.op == "runtime":
                value = np.asarray((runtime or {}).get(node.attrs["name"], 0), np.int64)
            elif node.op == "scan":
                given = [values[i] for i in node.inputs]
                loops[node.id] = _repeat(node.attrs["body"], given, batch)
                value = np.zeros(())
            elif node.op == "scan_result":
                value = loops[node.inputs[0]][node.attrs["index"]]
            else:
                op = lookup(node.op)
                inputs = [values[i] for i in node.inputs]
                if op.view is not None:
                    value = op.view(inputs[0], node.attrs)
                else:
                    assert op.cpu is not None
                    value = _garbage(concrete(node.spec.shape, batch), node.spec.dtype)
                    op.cpu(value, inputs, node.attrs)
            assert value.shape == concrete(node.spec.shape, batch), str(node)
            assert value.dtype == node.spec.dtype, str(node)
            values.append(value)
    return [values[i] for i in graph.outputs]


def _repeat(body: Body, given: Sequence[np.ndarray], batch: int) -> list[np.ndarray]:
    """Compute a scan's results."""
    behind = body.carries + body.elements
    carry, xs, fixed = given[: body.carries], given[body.carries : behind], given[behind:]
    results = [np.zeros(concrete(spec.shape, batch), spec.dtype) for spec in body.specs]
    order = range(body.length)
    for t in reversed(order) if body.reverse else order:
        for i, value in zip(body.kept, carry, strict=True):
            results[i][t] = value
        found = interpret(body.graph, [*carry, *(x[t] for x in xs), *fixed], batch)
        carry = found[: body.carries]
        for i, value in zip(body.made, found[body.carries :], strict=True):
            results[i][t] = value
    return [*carry, *results[body.carries :]]


def _garbage(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Make what a kernel may find in the memory it is given: nothing may depend on it."""
    return np.full(shape, 77 if dtype.kind != "f" else np.nan).astype(dtype)
