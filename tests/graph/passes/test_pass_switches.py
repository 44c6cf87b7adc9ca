"""`ar.config.passes`: results are the same without any of the optional passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
    device,
    function,
    ops,
    scan,
    set_seed,
)
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core import pass_switches
from tests.nn.common import blobs


@pytest.fixture(autouse=True)
def _all_on() -> Iterator[None]:
    yield
    for name in pass_switches.OPTIONAL:
        pass_switches.switch(name, True)


_SUBSETS = [c for n in range(7) for c in itertools.combinations(pass_switches.OPTIONAL, n)]


def _cases(usual: Callable[[tuple[str, ...]], bool]) -> list[Any]:
    """List all subsets; those that are not usual are for `make torture`."""
    marks = [() if usual(off) else (pytest.mark.torture,) for off in _SUBSETS]
    return [
        pytest.param(off, marks=mark, id=",".join(off) or "none")
        for off, mark in zip(_SUBSETS, marks, strict=True)
    ]


def _without(off: tuple[str, ...]) -> None:
    for name in off:
        config.passes[name] = False


def _trained() -> list[np.ndarray]:
    x, y = blobs(48)
    set_seed(1)
    model = nn.Sequential(
        [nn.Dense(16, "gelu"), nn.LayerNorm(), nn.Dropout(0.2), nn.Dense(3, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", ["accuracy"])
    history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return [np.array(history.history["loss"]), *model.get_weights()]


@pytest.fixture(scope="module")
def trained() -> list[np.ndarray]:
    return _trained()


@pytest.mark.parametrize("off", _cases(lambda _: True))
def test_results_are_the_same_without_any_of_them(
    off: tuple[str, ...], trained: list[np.ndarray]
) -> None:
    _without(off)
    for one, other in zip(_trained(), trained, strict=True):
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


@pytest.mark.parametrize("off", _cases(lambda off: len(off) in (1, 6)))
def test_so_are_those_of_steps_that_exchange_values_and_have_empty_shares(
    off: tuple[str, ...], exchanged: list[np.ndarray]
) -> None:
    _without(off)
    for one, other in zip(_exchanged(), exchanged, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


class _Network:
    """Images to features, to attention, to a recurrent layer: on both devices of a replica."""

    def __init__(self) -> None:
        self.convolution = nn.Conv2D(4, 3, padding="same", activation="relu")
        self.norm, self.pool = nn.BatchNorm(synchronized=True), nn.MaxPool2D(2)
        with device("CPU:1"):
            self.attention = nn.MultiHeadAttention(2, 4, dropout=0.1)
            self.after, self.cell = nn.LayerNorm(), nn.Dense(8, "tanh")
            self.scores = nn.Dense(3)
        self.counted = Variable(np.zeros((), np.float32), name="counted")

    @property
    def variables(self) -> list[Variable]:
        layers = (self.convolution, self.norm, self.attention, self.after, self.cell, self.scores)
        return [each for layer in layers for each in layer.variables]

    def __call__(self, x: Any) -> Any:
        features = self.pool(self.norm(self.convolution(x), training=True))
        words = ops.reshape(features, (x.shape[0], 4, 4))
        words = self.after(words + self.attention(words, training=True))

        def step(carry: Any, word: Any) -> tuple[Any, Any]:
            carry = self.cell(ops.concatenate([carry, word], -1))
            return carry, carry * 2.0

        start = ops.zeros((x.shape[0], 8), x.dtype)
        last, each = scan(step, start, ops.transpose(words, (1, 0, 2)))
        return self.scores(last + ops.mean(each, 0))


def _placed_apart() -> list[np.ndarray]:
    """Take three steps on two replicas of two devices each, the last of a single sample."""
    set_seed(3)
    strategy = MirroredStrategy(devices_per_replica=2)
    with strategy.scope():
        network, optimizer = _Network(), optim.Adam(0.01)

    @function
    def step(x: Any, y: Any) -> Any:
        scores = network(x)
        loss = nn.losses.sparse_categorical_crossentropy(y, scores, from_logits=True)
        network.counted.assign(network.counted + all_reduce(ops.sum(loss)))
        optimizer.minimize(loss, [each for each in network.variables if each.trainable])
        best = ops.top_k(scores, 2)[1]
        return loss, scores, best, ops.normal((x.shape[0], 2)), network.counted * 2.0

    generator = np.random.default_rng(0)
    batches = [
        (generator.normal(size=(rows, 4, 4, 2)).astype(np.float32), generator.integers(0, 3, rows))
        for rows in (7, 5, 1)
    ]
    values: list[np.ndarray] = []
    for batch in strategy.distribute_dataset(batches):
        for result in strategy.run(step, args=batch):
            values += [np.asarray(each) for each in result.values]
    weights = [variable.numpy() for variable in (*network.variables, network.counted)]
    strategy.close()
    return values + weights


@pytest.fixture(scope="module")
def placed_apart() -> list[np.ndarray]:
    config.set_logical_devices("CPU", 4)
    return _placed_apart()


# All that `make test` has time for; each pass is off in two of them.
_HALVES = (
    ("prune", "simplify", "bucket"),
    ("fold", "narrow", "fuse", "plan_buffers"),
    pass_switches.OPTIONAL,
)


@pytest.mark.parametrize("off", _cases(lambda off: off in _HALVES))
def test_so_are_those_of_convolutions_attention_scans_and_several_devices(
    off: tuple[str, ...], placed_apart: list[np.ndarray]
) -> None:
    _without(off)
    for one, other in zip(_placed_apart(), placed_apart, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


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
    assert dict(config.passes) == dict.fromkeys(pass_switches.OPTIONAL, True)


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
