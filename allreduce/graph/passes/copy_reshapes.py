"""Make the copies of reshapes explicit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.spec import concrete
from allreduce.graph.passes.scan_bodies import inside

_ROWS = 1000  # for the layout of values; the batch size is unknown


def copy_reshapes(graph: Graph) -> Graph:
    """Insert copies for reshapes that cannot be views, such as after a transpose.

    NumPy would copy there too, but to new memory in each step, outside of the plan. Inputs are
    assumed to be C-contiguous; NumPy still copies others.
    """
    rewriter = Rewriter(graph)
    views: dict[int, np.ndarray] = {}
    for node in graph.nodes:
        view = lookup(node.op).view
        if view is None:
            rewriter.keep(node)
            continue
        (source,) = node.inputs
        x = views[source] if source in views else _laid_out(graph.nodes[source])
        if _copies(node, x):
            rewriter.keep(node, op="reshape_copy")
        else:
            rewriter.keep(node)
            views[node.id] = view(x, node.attrs)
    return inside(rewriter.finish(), copy_reshapes)


def _laid_out(node: Node) -> np.ndarray:
    """Return an array that lies as a node's value will, for its strides alone."""
    if node.op == "constant":
        value: np.ndarray = node.attrs["value"]
        return value
    shape, dtype = concrete(node.spec.shape, _ROWS, _ROWS), node.spec.dtype
    strides = [dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # It is never read, so it takes no memory.
    return as_strided(np.empty(1, dtype), shape, strides)


def _copies(node: Node, x: np.ndarray) -> bool:
    if node.op != "reshape" or node.device is None:
        return False
    if not lookup("reshape_copy").runs_on(node.device.kind):
        return False
    return not can_view(x, concrete(node.spec.shape, _ROWS, _ROWS))


def can_view(x: np.ndarray, shape: Sequence[int]) -> bool:
    """Return whether an array can be viewed in another shape.

    Between two axes whose memory is not contiguous, the new shape must have a border too.
    """
    axes = [(size, stride) for size, stride in zip(x.shape, x.strides, strict=True) if size != 1]
    pairs = pairwise(axes)
    jumps = {
        prod(size for size, _ in axes[place:])
        for place, ((_, stride), (size, step)) in enumerate(pairs, 1)
        if stride != size * step
    }
    return not x.size or jumps <= {prod(shape[axis:]) for axis in range(len(shape))}
