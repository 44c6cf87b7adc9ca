"""Networks of layers, losses and optimizers, step by step beside PyTorch where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from allreduce import config, nn, optim
from allreduce.graph import set_seed
from tests.nn.beside_torch import ACTIVATIONS, F, apply_layer, of_torch, torch, train_beside

ROWS = (4, 4, 3)  # of the batches
FLAT, IMAGES, WORDS = (6,), (8, 7, 4), (5,)  # the shapes of a sample


@dataclass(frozen=True)
class Loss:
    """A loss of ours, the same in PyTorch, and the targets for outputs `(batch, …, classes)`."""

    ours: Any
    theirs: Callable[[Any, Any], Any]
    targets: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _labels(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(0, shape[-1], shape[:-1])


def _shares(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.dirichlet(np.ones(shape[-1]), shape[:-1])


def _logs(outputs: Any) -> Any:
    return torch.log(outputs / outputs.sum(-1, keepdim=True))


LOSSES: Mapping[str, Loss] = {
    "mse": Loss(
        nn.losses.mean_squared_error,
        lambda y, z: F.mse_loss(z, y, reduction="none").mean(-1),
        lambda random, shape: random.normal(size=shape),
    ),
    "sparse logits": Loss(
        nn.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda y, z: F.cross_entropy(z, y, reduction="none"),
        _labels,
    ),
    "sparse shares": Loss(
        nn.losses.sparse_categorical_crossentropy,
        lambda y, z: F.nll_loss(_logs(z), y, reduction="none"),
        _labels,
    ),
    "logits": Loss(
        nn.losses.CategoricalCrossentropy(from_logits=True),
        lambda y, z: F.cross_entropy(z, y, reduction="none"),
        _shares,
    ),
    "shares": Loss(
        nn.losses.categorical_crossentropy, lambda y, z: -(y * _logs(z)).sum(-1), _shares
    ),
}


@dataclass(frozen=True)
class Network:
    """A network of layers.

    Attributes:
        layers: Makes them.
        sample: The shape of a sample; of integers below 9 if an embedding comes first.
        loss: A row of LOSSES.
        optimizer: Makes it.
    """

    layers: Callable[[], Sequence[nn.Layer]]
    sample: tuple[int, ...] = FLAT
    loss: str = "mse"
    optimizer: Callable[[], optim.Optimizer] = lambda: optim.SGD(0.1)


def _conv(*after: nn.Layer, **settings: Any) -> list[nn.Layer]:
    layers = [nn.Conv2D(4, **{"kernel_size": 3, **settings}), *after]
    return [*layers, nn.Flatten(), nn.Dense(3)]


def _two(activation: Any) -> list[nn.Layer]:
    return [nn.Dense(8, activation), nn.Dense(3)]


def _normed(layer: nn.Layer) -> list[nn.Layer]:
    return [nn.Dense(8, "tanh"), layer, nn.Dense(3)]


def _sequence(*layers: nn.Layer) -> list[nn.Layer]:
    return [nn.Embedding(9, 8), *layers, nn.Flatten(), nn.Dense(3)]


NETWORKS: Mapping[str, Network] = {
    "linear": Network(lambda: [nn.Dense(3)]),
    "no bias": Network(lambda: [nn.Dense(8, "tanh", use_bias=False), nn.Dense(3)]),
    "deep": Network(lambda: [*(nn.Dense(6, "tanh") for _ in range(6)), nn.Dense(2)]),
    "one unit": Network(lambda: [nn.Dense(1, "sigmoid")], sample=(1,)),
    "dense over places": Network(lambda: [*_two("relu"), nn.Flatten(), nn.Dense(2)], (5, 6)),
    **{f"dense {each}": Network(partial(_two, each)) for each in ACTIVATIONS},
    "activation layer": Network(lambda: [nn.Dense(8), nn.Activation("gelu"), nn.Dense(3)]),
    "dropout of nothing": Network(lambda: _normed(nn.Dropout(0.0))),
    "sparse logits": Network(lambda: _two("relu"), loss="sparse logits"),
    "sparse, folded softmax": Network(
        lambda: [nn.Dense(8, "relu"), nn.Dense(3, "softmax")], loss="sparse shares"
    ),
    "sparse, shares": Network(lambda: [nn.Dense(3, "sigmoid")], loss="sparse shares"),
    "logits": Network(lambda: _two("tanh"), loss="logits"),
    "folded softmax": Network(lambda: [nn.Dense(8, "relu"), nn.Dense(3, "softmax")], loss="shares"),
    "shares": Network(lambda: [nn.Dense(3, "sigmoid")], loss="shares"),
    "convolution": Network(lambda: _conv(activation="relu"), IMAGES),
    "convolution, same": Network(lambda: _conv(padding="same", activation="tanh"), IMAGES),
    "convolution, strides": Network(lambda: _conv(strides=2), IMAGES),
    "convolution, strides, same": Network(lambda: _conv(strides=(3, 2), padding="same"), IMAGES),
    "convolution, dilation": Network(lambda: _conv(dilation_rate=(2, 3)), IMAGES),
    "convolution, dilation, same": Network(
        lambda: _conv(dilation_rate=2, padding="same", kernel_size=(2, 3)), IMAGES
    ),
    "convolution, groups": Network(lambda: _conv(groups=2), IMAGES),
    "convolution, by channel": Network(lambda: _conv(groups=4, use_bias=False), IMAGES),
    "convolution 1 × 1": Network(lambda: _conv(kernel_size=1, activation="relu"), IMAGES),
    "two convolutions": Network(
        lambda: [
            *(nn.Conv2D(5, 3, activation="relu"), nn.MaxPool2D()),
            *_conv(kernel_size=2, padding="same"),
        ],
        IMAGES,
    ),
    "largest": Network(lambda: _conv(nn.MaxPool2D(2)), IMAGES),
    "largest, overlapping": Network(lambda: _conv(nn.MaxPool2D(3, 2, "same")), IMAGES),
    "averages": Network(lambda: _conv(nn.AveragePooling2D((2, 3))), IMAGES),
    "averages, overlapping": Network(lambda: _conv(nn.AveragePooling2D(3, 1, "same")), IMAGES),
    "one average": Network(
        lambda: [nn.Conv2D(5, 3, activation="tanh"), nn.GlobalAveragePooling2D(), nn.Dense(3)],
        IMAGES,
    ),
    "batch norm": Network(lambda: _normed(nn.BatchNorm(momentum=0.8))),
    "batch norm of images": Network(lambda: _conv(nn.BatchNorm(scale=False)), IMAGES),
    "layer norm": Network(lambda: _normed(nn.LayerNorm())),
    "layer norm of images": Network(lambda: _conv(nn.LayerNorm(center=False)), IMAGES),
    "embedding": Network(_sequence, WORDS),
    "attention": Network(lambda: _sequence(nn.MultiHeadAttention(2, 4)), WORDS),
    "causal attention": Network(
        lambda: _sequence(nn.MultiHeadAttention(4, 2, 3, causal=True), nn.LayerNorm()), WORDS
    ),
    "momentum": Network(lambda: _two("relu"), optimizer=lambda: optim.SGD(0.05, momentum=0.9)),
    "nesterov": Network(
        lambda: _two("tanh"), optimizer=lambda: optim.SGD(0.05, momentum=0.7, nesterov=True)
    ),
    "adam": Network(lambda: _two("relu"), optimizer=lambda: optim.Adam(0.01)),
    "adam, betas": Network(
        lambda: _conv(activation="relu"),
        IMAGES,
        optimizer=lambda: optim.Adam(0.01, beta_1=0.5, beta_2=0.9, epsilon=1e-3),
    ),
}


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    before = config.floatx()
    config.set_floatx(request.param)
    yield request.param
    config.set_floatx(before)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_trained_as_pytorch_trains_it(name: str, dtype: str) -> None:
    network, random = NETWORKS[name], np.random.default_rng([*name.encode()])
    set_seed(7)
    model = nn.Sequential(network.layers())
    words = isinstance(model.layers[0], nn.Embedding)
    model.build_for(network.sample, "int64" if words else dtype)
    for variable in model.variables:  # biases too
        variable.assign((variable + random.normal(0, 0.1, variable.shape)).numpy().astype(dtype))
    frozen = {path: of_torch(v) for path, v in model.named_variables().items() if not v.trainable}

    def theirs(weights: Mapping[str, Any], x: Any, training: bool = True) -> Any:
        for i, layer in enumerate(model.layers):
            every = {**weights, **frozen}
            own = {k.removeprefix(f"{i}/"): v for k, v in every.items() if k.startswith(f"{i}/")}
            x = apply_layer(layer, own, x, training)
        return x

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (rows, *network.sample)
        x = random.integers(0, 9, shape) if words else random.normal(size=shape).astype(dtype)
        y = loss.targets(random, (rows, *model.output_shape[1:]))  # type: ignore[index]
        return x, y if y.dtype.kind == "i" else y.astype(dtype)

    loss = LOSSES[network.loss]
    trained = train_beside(
        {path: v for path, v in model.named_variables().items() if v.trainable},
        lambda x, y: loss.ours(y, model(x, training=True)),
        lambda weights, x, y: loss.theirs(y, theirs(weights, x)),
        [draw(rows) for rows in ROWS],
        network.optimizer(),
        tolerance=1e-9 if dtype == "float64" else 1e-3,
    )
    x, _ = draw(5)
    tolerance = 1e-9 if dtype == "float64" else 1e-3
    np.testing.assert_allclose(
        model.predict(x, verbose=0),
        theirs(trained, of_torch(x), training=False).detach().numpy(),
        rtol=tolerance,
        atol=tolerance / 100,
    )
