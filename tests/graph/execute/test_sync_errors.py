"""`enable_sync_errors` ends each instruction before the next one, and changes no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from tests.graph.eager.eager_cases import NETWORKS, trained
from tests.graph.execute.test_inter_op_threads import Split


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())
    ar.config.enable_sync_errors()


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
