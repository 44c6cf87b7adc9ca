"""Steps that native code computes as a whole, results included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import events
from allreduce.graph.replicate.owner import default_replicator


def _is_whole(fn: Any) -> bool:
    """Say whether a function's latest step was computed as a whole."""
    compiled = default_replicator().latest(fn)
    assert compiled is not None
    latest = compiled.executors[0].latest
    return latest is not None and latest._step is not None


def _x(first: float) -> np.ndarray:
    return np.arange(first, first + 4, dtype=np.float32)


@ar.function
def scaled(x: ar.Tensor) -> tuple[ar.Tensor, ar.Tensor]:
    return ar.ops.relu(x - 1.0) * 2.0, x + 1.0


def test_each_step_returns_arrays_of_its_own() -> None:
    results = [[np.asarray(each) for each in scaled(_x(i))] for i in range(6)]
    assert _is_whole(scaled)
    for i, (a, b) in enumerate(results):
        np.testing.assert_array_equal(a, np.maximum(_x(i) - 1, 0) * 2)
        np.testing.assert_array_equal(b, _x(i) + 1)


def test_inputs_with_other_strides_and_reports_take_the_other_way() -> None:
    for _ in range(3):
        scaled(_x(0))
    a, _ = scaled(np.arange(8, dtype=np.float32)[::2])
    np.testing.assert_array_equal(a, [0, 2, 6, 10])
    found: list[str] = []
    unsubscribe = events.subscribe(lambda event: found.append(event.name))
    scaled(_x(0))
    unsubscribe()
    assert found


def test_a_changed_variable_and_a_refused_label_are_noticed() -> None:
    bias = ar.Variable(np.zeros(3, np.float32))

    @ar.function
    def losses(labels: ar.Tensor, logits: ar.Tensor) -> ar.Tensor:
        return ar.nn.losses.sparse_categorical_crossentropy(labels, logits + bias, from_logits=True)

    logits, labels = np.zeros((2, 3), np.float32), np.array([0, 2])
    for _ in range(3):
        np.testing.assert_allclose(np.asarray(losses(labels, logits)), np.log(3), rtol=1e-6)
    assert _is_whole(losses)
    with pytest.raises(ar.errors.AllreduceError, match="7"):
        losses(np.array([0, 7]), logits)
    bias.assign(np.array([np.log(2), 0, 0], np.float32))
    expected = np.log([2, 4])
    np.testing.assert_allclose(np.asarray(losses(labels, logits)), expected, rtol=1e-6)
