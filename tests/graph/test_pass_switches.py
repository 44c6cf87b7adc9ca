"""`ar.config.passes`: results are the same without any of the optional passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from allreduce import MirroredStrategy, config, nn, optim
from allreduce.errors import UsageError
from allreduce.graph import (
    Tensor,
    Variable,
    all_gather,
    all_reduce,
    function,
    ops,
    passes,
    set_seed,
)
from allreduce.graph.gradient import backward
from tests.nn.common import blobs


@pytest.fixture(autouse=True)
def _all_on() -> Iterator[None]:
    yield
    for name in passes.OPTIONAL:
        passes.switch(name, True)


# The largest subsets, too: everything off but one.
_SUBSETS = [c for n in (0, 1, 2, 5, 6) for c in itertools.combinations(passes.OPTIONAL, n)]


@pytest.mark.parametrize("off", _SUBSETS, ids=str)
def test_results_are_the_same_without_any_of_them(off: tuple[str, ...]) -> None:
    x, y = blobs(48)

    def trained() -> tuple[list[float], list[np.ndarray]]:
        set_seed(1)
        model = nn.Sequential(
            [nn.Dense(16, "gelu"), nn.LayerNorm(), nn.Dropout(0.2), nn.Dense(3, "softmax")]
        )
        model.compile("adam", "sparse_categorical_crossentropy", ["accuracy"])
        history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"], model.get_weights()

    wanted = trained()
    for name in off:
        config.passes[name] = False
    found = trained()
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for one, other in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def _exchanged() -> list[np.ndarray]:
    """Take two steps on three replicas, the second of which leaves one without samples."""
    set_seed(1)
    strategy = MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        w = Variable(np.linspace(-1, 1, 4), name="w")
        center = Variable(np.zeros(4), name="center")
        optimizer = optim.SGD(0.1, momentum=0.5)

    @function
    def step(x: Any) -> Any:
        total = all_reduce(ops.sum(x * 1.0, axis=0)) / all_reduce(ops.size(x, 0))
        center.assign(0.5 * center + 0.5 * ops.tanh(total + 0.0))
        own = ops.tanh((ops.dropout(x, 0.2) - center) * w)
        scores = own @ ops.transpose(all_gather(own)) / 2.0
        loss = ops.sum(ops.square(scores - 0.3), axis=1)
        optimizer.minimize(loss + ops.sum(ops.exp(-w) * 1e-2), [w])
        return loss, scores, ops.stop_gradient(total) * 2.0, center.__tensor__()

    values: list[np.ndarray] = []
    for rows in (7, 2):
        x = np.random.default_rng(rows).normal(size=(rows, 4))
        (batch,) = strategy.distribute_dataset([(x,)])
        values += [each for result in strategy.run(step, args=batch) for each in result.values]
    return [*values, *w.storage, *center.storage]


@pytest.fixture(scope="module")
def exchanged() -> list[np.ndarray]:
    config.set_logical_devices("CPU", 4)
    return _exchanged()


# One is off, or all but one, or all.
_FEW_OR_MOST = [c for n in (1, 5, 6) for c in itertools.combinations(passes.OPTIONAL, n)]


@pytest.mark.parametrize("off", _FEW_OR_MOST, ids=str)
def test_so_are_those_of_steps_that_exchange_values_and_have_empty_shares(
    off: tuple[str, ...], exchanged: list[np.ndarray]
) -> None:
    for name in off:
        config.passes[name] = False
    for one, other in zip(_exchanged(), exchanged, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_switch_holds_for_new_traces() -> None:
    traces = []

    @function
    def step(x: Tensor) -> Any:
        traces.append(1)
        return backward(ops.sum(ops.exp(x) * 2.0), [x], 1.0)[0]

    step(np.ones(3))
    config.passes["fuse"] = False
    step(np.ones(3))
    config.passes["fuse"] = True
    step(np.ones(3))
    assert len(traces) == 2
    assert dict(config.passes) == dict.fromkeys(passes.OPTIONAL, True)


def test_a_pass_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'fuse'"):
        config.passes["fusee"] = False
    with pytest.raises(UsageError, match="did you mean 'fold'"):
        config.passes["folds"]
    assert "folds" not in config.passes
    assert config.passes.get("folds") is None
    with pytest.raises(UsageError, match=r"is on .True. or off .False., not 0"):
        config.passes["fuse"] = 0  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r'ar.config.passes\["fold"\] = False'):
        del config.passes["fold"]
