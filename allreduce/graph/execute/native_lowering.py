"""Lower instructions to native tasks: one function per operation adds the task to a replay.

Each returns False for arrays that native code does not support; NumPy then runs the instruction.
Results have the same bits either way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from allreduce import _native
from allreduce._native import Replay
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup

Arrays = Sequence[np.ndarray]
Add = Callable[[Replay, Node, np.ndarray, Arrays], bool]


def add(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    """Add an instruction to a replay; returns whether that could be done."""
    lower = _ADD.get(node.op, _link if lookup(node.op).elementwise else None)
    return lower is not None and lower(replay, node, out, inputs)


def _link(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    """Add an element-wise operation as a chain of one."""
    links = [(node.op, list(range(len(inputs))), out.dtype.num, 0)]
    chain = _native.chain(links, [x.dtype.num for x in inputs]) if inputs else None
    return chain is not None and replay.add_chain(chain, out, list(inputs))


def _fused(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    return replay.add_chain(node.attrs["chain"].native, out, list(inputs))


def _matmul(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    return replay.add_product(out, *inputs)


def _sum_to(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    return replay.add_column_sums(out, inputs[0])


def _copy(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    # NumPy reads overlapping inputs before it overwrites them.
    apart = not np.may_share_memory(out, inputs[0])
    return apart and replay.add_copy(out, inputs[0])


def _store(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    if "adds" not in node.attrs:
        return _copy(replay, node, out, inputs)
    number = out.dtype.num
    chain = _native.chain([("add", [0, 1], number, 0)], [number, inputs[0].dtype.num])
    return chain is not None and replay.add_chain(chain, out, [out, inputs[0]])


def _reshape_copy(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    return _copy(replay, node, out.reshape(inputs[0].shape), inputs)


def _size(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    """Add instructions that depend only on shapes, which are equal in all steps of a frame."""
    value, kernel = np.empty_like(out), lookup(node.op).cpu
    assert kernel is not None, node
    kernel(value, inputs, node.attrs)
    return replay.add_copy(out, value)


def _fill(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    return replay.add_copy(out, np.asarray(node.attrs["value"], out.dtype))


def _rows(replay: Replay, node: Node, out: np.ndarray, inputs: Arrays) -> bool:
    """Add a row operator, unless an attribute asks for more than the kernel can do.

    Kernels know their numbers, and work along the last axis. With any other attribute, such as
    `axis`, the Python kernel runs: it knows what the attribute means.
    """
    last = (inputs[0].ndim - 1,)
    others = node.attrs.keys() - _ROWS[node.op]
    if any(name != "axes" or node.attrs[name] != last for name in others):
        return False
    numbers = [node.attrs[name] for name in _ROWS[node.op]]
    return replay.add_rows(node.op, out, list(inputs), numbers)


# Row operators and the names of their settings.
_ROWS = _native.row_operators()

_ADD: dict[str, Add] = {
    "fused": _fused,
    "matmul": _matmul,
    "sum_to": _sum_to,
    "broadcast_to": _copy,
    "reshape_copy": _reshape_copy,
    "store_gradient": _store,
    "store_count": _store,
    "assign": _copy,
    "size": _size,
    "fill": _fill,
    **dict.fromkeys(_ROWS, _rows),
}


def _find_blas() -> None:
    """Have native matrix products call NumPy's BLAS; if it is not found, NumPy computes them."""
    module = sys.modules.get("numpy._core._multiarray_umath")
    path = getattr(module, "__file__", None)
    if path is not None:
        _native.find_blas(path)


_find_blas()
