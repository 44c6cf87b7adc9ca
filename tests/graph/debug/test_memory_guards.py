"""`enable_sync_errors` detects writes of a kernel next to its output, at its line."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.errors import UsageError
from allreduce.graph.core import op_table
from tests.graph.eager.eager_cases import NETWORKS, trained
from tests.graph.execute.test_inter_op_threads import Split


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))
    ar.config.enable_sync_errors()


def _beyond(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Any) -> None:
    longer = np.lib.stride_tricks.as_strided(out, (len(out) + 1,))
    longer[...] = 1.0


def _before(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Any) -> None:
    out[...] = inputs[0]
    np.lib.stride_tricks.as_strided(out[1:], (2,), (-2 * out.itemsize,))[1] = 0.0


def _input(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Any) -> None:
    inputs[0][...] *= 2.0
    out[...] = inputs[0]


def _native(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Any) -> None:
    out[...] = inputs[0]
    ctypes.memset(inputs[0].ctypes.data, 0, 1)  # of a number's last bits


@pytest.mark.parametrize("how", ["traced", "eagerly", "at once"])
@pytest.mark.parametrize(
    ("kernel", "error", "said"),
    [
        (
            _beyond,
            UsageError,
            r"test_memory_guards.py:\d+: the kernel of operator 'bad' has written",
        ),
        (
            _before,
            UsageError,
            r"before or behind its output, float64 \(3,\); it must write only that",
        ),
        (_input, ValueError, "read-only"),
        (
            _native,
            UsageError,
            r"py:\d+: bad: .* operator 'bad' has changed its input 0, float64 \(3,",
        ),
    ],
)
def test_what_a_kernel_writes_beside_its_output_is_found(
    kernel: Callable[..., None], error: type[Exception], said: str, how: str
) -> None:
    bad = ar.register_op("bad", shape=lambda specs, attrs: specs[0], cpu=kernel)
    ar.config.run_functions_eagerly(how == "eagerly")

    def step(x: Any) -> ar.Tensor:
        return ar.ops.exp(bad(ar.ops.tanh(x)))

    with pytest.raises(error, match=said):
        (step if how == "at once" else ar.function(step))(np.ones(3))


@pytest.mark.parametrize("network", [*NETWORKS, "split"])
def test_training_gives_the_same_bits(network: str) -> None:
    split = network == "split"
    make: Callable[[], Any] = Split if split else NETWORKS[network]
    owned = [f"CPU:{i}" for i in range(4 if split else 2)]
    strategy = ar.MirroredStrategy(owned, devices_per_replica=2 if split else 1)
    found = trained(make, strategy, eagerly=False)
    ar.config.enable_sync_errors(False)
    for one, other in zip(found, trained(make, strategy, eagerly=False), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
