"""Steps without pipelining: one thing after the other, to the same bits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.graph.execute.timing import Clock
from allreduce.reduction import sharding
from tests.graph.eager.eager_cases import NETWORKS, trained


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    # Each variable is a bucket.
    monkeypatch.setattr(options, "_current", options.Options(buckets=64))


@pytest.mark.parametrize("network", ["dense", "images", "sliced"])
def test_the_bits_are_the_same(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if network == "sliced":
        monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)
        network = "dense"
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    wanted = trained(NETWORKS[network], strategy, eagerly=False)
    ar.config.set_pipelining(False)
    for one, other in zip(trained(NETWORKS[network], strategy, eagerly=False), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def _check_turns(clocks: list[Clock]) -> None:
    assert len(clocks) == 3
    for one, other in pairwise(clocks):
        assert one.over <= other.started


def test_nothing_is_under_way_beside_another_instruction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = [ar.Variable(np.ones((4, 4), np.float32), name=f"m/{i}") for i in range(3)]
        optimizer = ar.optim.SGD(0.1)

    def step(x: Any) -> Any:
        for each in weights:
            x = ar.ops.tanh(x @ each)
        optimizer.minimize(ar.ops.sum(x, axis=1), weights)

    (batch,) = strategy.distribute_dataset([np.ones((4, 4), np.float32)])

    def run() -> list[Clock]:
        strategy.run(step, (batch,))
        latest = strategy.latest(step)
        bound = latest.executors[0].latest if latest else None
        assert bound is not None
        assert bound.timing is not None
        return list(bound.timing.clocks.values())

    for _ in range(2):  # in Python, and in native code
        first, *_, last = run()
        assert first.awaited > last.started
    assert ar.config.get_pipelining()
    ar.config.enable_sync_errors()  # so that an error is that of its own instruction
    _check_turns(run())
    ar.config.enable_sync_errors(False)
    ar.config.set_pipelining(False)  # of what is traced already
    for _ in range(2):
        _check_turns(run())
    ar.observe.explain(strategy, step)
    said = capsys.readouterr().out
    for how in ("with", "without"):
        assert f"steps {how} pipelining: " in said
    assert said.count("the median of 2") == 2
