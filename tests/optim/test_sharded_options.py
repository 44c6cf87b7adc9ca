"""Options of optimizers in sharded updates: the same values as without slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

import allreduce as ar
from allreduce import optim
from allreduce.devices import options as device_options
from allreduce.devices.options import Options
from allreduce.graph.update import sharded_update
from tests.harness import run_ranks

CASES: dict[str, Any] = {
    "norm": lambda: optim.AdamW(0.01, clip_norm=0.5, epsilon=1e-3),
    "norm of SGD": lambda: optim.SGD(0.1, 0.9, clip_norm=0.5),
    "value": lambda: optim.Adam(0.01, clip_value=1e-3, epsilon=1e-3),
    "average": lambda: optim.Adam(0.01, ema_momentum=0.5, epsilon=1e-3),
    "groups": lambda: optim.AdamW(0.01, 0.3, epsilon=1e-3, groups=_groups, clip_norm=0.5),
}

# In memory that all members map, new values are stored where they are computed.
FUSED = ("norm", "norm of SGD")


def _groups(path: str) -> dict[str, float]:
    return {"weight_decay": 0.0, "learning_rate_factor": 0.5} if "bias" in path else {}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    ar.config.set_logical_devices("CPU", 4)
    yield
    ar.config.passes["shard"] = True


def trained(strategy: Any, optimizer: Any, restart: bool = False) -> tuple[dict[str, Any], str]:
    """Take six steps; return variables and state, and the step's graph as text."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=(6, 12, 300)).astype(np.float32)
    with strategy.scope():
        kernel = ar.Variable(rng.normal(size=(300, 500)).astype(np.float32) / 30, name="m/kernel")
        bias = ar.Variable(np.zeros(500, np.float32), name="m/bias")

    @ar.function
    def step(rows: Any) -> None:
        loss = ar.ops.sum(ar.ops.square(ar.ops.tanh(rows @ kernel + bias) - 0.5), axis=1)
        optimizer.minimize(loss, [kernel, bias])

    for number, each in enumerate(x):
        for batch in strategy.distribute_dataset([(each,)]):
            strategy.run(step, args=batch)
        if restart and number == 2:
            optimizer.consolidate()
            state = optimizer.state()
            optimizer.load_state({key: np.zeros_like(value) for key, value in state.items()})
            optimizer.load_state(state)
    optimizer.consolidate()
    found = {"kernel": kernel.numpy(), "bias": bias.numpy(), **optimizer.state()}
    return found, str(strategy.latest(step).graph)


def is_fused(graph: str) -> bool:
    """Return whether members store their slices in each other's memory, or gather them."""
    assert ("update_slices" in graph) != ("update_own" in graph)
    return "update_slices" in graph


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-4, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_slices_do_not_change_what_options_do(case: str, replicas: int) -> None:
    alone, _ = trained(MirroredStrategy(["CPU:0"]), CASES[case]())
    strategy = MirroredStrategy([f"CPU:{place}" for place in range(replicas)])
    ar.config.passes["shard"] = False
    whole, graph = trained(strategy, CASES[case]())
    assert "update_own" not in graph
    ar.config.passes["shard"] = True
    for restart in (False, True):
        found, graph = trained(strategy, CASES[case](), restart)
        assert is_fused(graph) == (case in FUSED)
        assert ("all_reduce_norm" in graph) == ("clip_norm" in CASES[case]().get_config())
        compare(found, whole)
        compare(found, alone)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.RMSprop(0.01, momentum=0.5, centered=True, epsilon=1e-3),
        lambda: optim.Adagrad(0.01),
        lambda: optim.Lion(0.001, weight_decay=0.1),
        lambda: optim.SGD(0.01, momentum=0.9, nesterov=True),
        lambda: optim.AdamW(0.01, 0.1),
    ],
    ids=["RMSprop", "Adagrad", "Lion", "SGD", "AdamW"],
)
def test_native_rules_are_fused_with_the_sum_and_keep_their_bits(make: Any) -> None:
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    ar.config.passes["shard"] = False
    wanted, _ = trained(strategy, make())
    ar.config.passes["shard"] = True
    found, graph = trained(strategy, make())
    assert "update_slices" in graph
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("case", FUSED)
def test_stored_slices_have_the_bits_of_gathered_ones(
    case: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = MirroredStrategy([f"CPU:{place}" for place in range(replicas)])
    stored, graph = trained(strategy, CASES[case]())
    assert is_fused(graph)
    monkeypatch.setattr(sharded_update, "updates", lambda _: False)
    monkeypatch.setattr(device_options, "_current", Options(shard_everywhere=True))
    gathered, graph = trained(strategy, CASES[case]())
    assert not is_fused(graph)
    for key, value in gathered.items():
        np.testing.assert_array_equal(stored[key], value, err_msg=key)


def _ranks() -> None:
    """Compare slices with whole updates on several ranks."""
    import allreduce as ar
    from tests.optim.test_sharded_options import CASES, FUSED, compare, is_fused, trained

    strategy = ar.MultiWorkerMirroredStrategy()
    for case, make in CASES.items():
        ar.config.passes["shard"] = False
        wanted, _ = trained(strategy, make())
        ar.config.passes["shard"] = True
        ar.config.set_shard_everywhere(True)
        found, graph = trained(strategy, make(), restart=True)
        shared = strategy.communicator.transport == "shared"
        assert is_fused(graph) == (shared and case in FUSED)
        compare(found, wanted)
    print("alike")


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [pytest.param(2, "shared", marks=pytest.mark.torture), (4, "shared"), (3, "tcp")],
)
def test_ranks_do_so_too(ranks: int, transport: str) -> None:
    results = run_ranks(_ranks, ranks, env={"ALLREDUCE_TRANSPORT": transport})
    assert [result.stdout.strip() for result in results] == ["alike"] * ranks
