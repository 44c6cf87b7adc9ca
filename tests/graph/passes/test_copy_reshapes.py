"""What a reshape has to copy is a value like others: planned for, and made by native code."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import allreduce as ar
from allreduce import ops
from allreduce.errors import OutOfMemoryError
from allreduce.graph.core import op_table
from allreduce.graph.passes.copy_reshapes import can_view
from allreduce.graph.replicate.owner import current_replicator


@st.composite
def _seen(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    """Draw an array that is a view of another, and a shape of as many elements."""
    x = np.zeros(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 2))):
        x = x.transpose(draw(st.permutations(range(x.ndim))))
        steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in x.shape]
        x = x[tuple(slice(None, None, step) for step in steps)]
    shape: list[int] = []
    for size in x.shape:
        for factor in (2, 2) if size == 4 else (size,):
            if draw(st.booleans()) and shape:
                shape[-1] *= factor
            else:
                shape.append(factor)
    return x, shape


@given(_seen())
def test_it_is_known_whether_numpy_copies(drawn: tuple[np.ndarray, list[int]]) -> None:
    x, shape = drawn
    assert can_view(x, shape) == np.may_share_memory(x, x.reshape(shape))


def _heads(x: Any) -> Any:
    """Compute what attention does around its products: heads apart, and together again."""
    apart = ops.transpose(ops.reshape(ops.exp(x), (-1, 8, 4, 16)), (0, 2, 1, 3))
    return ops.tanh(ops.reshape(apart * 2.0, (-1, 32, 16))), ops.tanh(
        ops.reshape(ops.transpose(apart * 2.0, (0, 2, 1, 3)), (-1, 8, 64))
    )


def _expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    apart = np.exp(x).reshape(-1, 8, 4, 16).transpose(0, 2, 1, 3) * np.float32(2)
    rows = len(x)
    together = apart.transpose(0, 2, 1, 3).reshape(rows, 8, 64)
    return np.tanh(apart.reshape(rows, 32, 16)), np.tanh(together)


@pytest.mark.parametrize("rows", [0, 1, 64])
def test_values_are_numpys(rows: int) -> None:
    step = ar.function(_heads)
    strategy = ar.MirroredStrategy(["CPU:0"])
    x = np.linspace(-1, 1, rows * 512, dtype="float32").reshape(rows, 8, 64)
    for _ in range(3):
        found = strategy.run(step, args=(ar.PerReplica((x,)),))
        for one, other in zip(found, _expected(x), strict=True):
            np.testing.assert_array_equal(strategy.local_results(one)[0], other)


def test_a_step_takes_no_memory_beside_what_is_planned() -> None:
    @ar.function
    def step(x: Any) -> Any:
        turned = ops.transpose(ops.exp(x), (1, 0))
        return ops.tanh(ops.reshape(turned, (-1,)))[:8]

    x = np.ones((512, 512), "float32")
    for _ in range(3):
        step(x)
    gc.collect()
    tracemalloc.start()
    step(x)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < x.nbytes // 4
    compiled = current_replicator().latest(step)
    assert compiled is not None
    bound = compiled.executors[0].latest
    assert bound is not None
    assert bound.frame.memory.least == 2 * x.nbytes


def test_shapes_that_memory_can_be_seen_in_stay_views() -> None:
    @ar.function
    def step(x: Any) -> Any:
        turned = ops.transpose(x * 2.0, (1, 0, 2))
        return ops.sum(ops.reshape(turned, (4, -1, 3, 2)) + 1.0), ops.expand_dims(x[:, 1:3, :], 1)

    step(np.ones((5, 4, 6), "float32"))
    compiled = current_replicator().latest(step)
    assert compiled is not None
    assert "reshape" in str(compiled.graph)
    assert "reshape_copy" not in str(compiled.graph)


def test_a_shortage_names_what_a_reshape_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))

    def kernel(out: np.ndarray, inputs: Any, attrs: Any) -> None:
        raise MemoryError("none left")

    vast = ar.register_op("vast", shape=lambda specs, attrs: specs[0], cpu=kernel)
    ar.config.run_functions_eagerly(True)
    try:
        with pytest.raises(OutOfMemoryError, match=r"float32\(12,\) of reshape at"):
            ar.function(lambda x: vast(ops.reshape(ops.transpose(x), (-1,))))(
                np.ones((3, 4), "float32")
            )
    finally:
        ar.config.run_functions_eagerly(False)
