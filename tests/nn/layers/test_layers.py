"""The layers of networks of images and sequences: trained, saved, shared by replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

from allreduce import config, nn, optim
from allreduce.errors import ShapeError, UsageError
from allreduce.graph import Tensor, function, ops, set_seed
from allreduce.graph.core.spec import BATCH

RANDOM = np.random.default_rng(7)
SEQUENCE = np.ones((2, 3, 4))
untyped: Any = nn


def _stripes(rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Make images (rows, 8, 8, 1) with stripes across or along, and which of both."""
    labels = RANDOM.integers(0, 2, rows)
    waves = np.sin(np.arange(8) * 2.5 + RANDOM.uniform(0, 6, (rows, 1)))
    across, along = (np.broadcast_to(w, (rows, 8, 8)) for w in (waves[:, None], waves[..., None]))
    images = np.where(labels[:, None, None] == 1, across, along)
    return (images + RANDOM.normal(0, 0.1, images.shape))[..., None], labels


def _convolutional(dtype: str = "float32", **settings: Any) -> nn.Sequential:
    set_seed(3)
    layers = [
        nn.Conv2D(8, 3, padding="same", activation="relu", dtype=dtype),
        nn.BatchNorm(momentum=0.8, dtype=dtype, **settings),
        nn.MaxPool2D(dtype=dtype),
        nn.Conv2D(8, (2, 3), strides=(1, 2), groups=2, use_bias=False, dtype=dtype),
        nn.LayerNorm(dtype=dtype),
        nn.AveragePooling2D(2, 1, "same", dtype=dtype),
        nn.GlobalAveragePooling2D(dtype=dtype),
        nn.Dense(2, activation="softmax", dtype=dtype),
    ]
    model = nn.Sequential(layers, dtype=dtype)
    model.compile("adam", "sparse_categorical_crossentropy", ["accuracy"])
    return model


class Reader(nn.Model):
    """Puts sequences of six numbers into two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 16)
        self.places = nn.Embedding(6, 16, embeddings_initializer="random_normal")
        self.attention = nn.MultiHeadAttention(2, 8, dropout=0.1)
        self.norm = nn.LayerNorm()
        self.last = nn.Dense(2, activation="softmax")

    def call(self, x: Tensor, training: bool = False) -> Any:
        h = self.words(x) + self.places(np.arange(6))
        h = self.norm(h + self.attention(h, training=training))
        return self.last(ops.mean(ops.relu(h), axis=1))


def test_a_convolutional_network_learns_and_is_saved(tmp_path: Path) -> None:
    x, y = _stripes(120)
    model = _convolutional()
    model.fit(x, y, batch_size=20, epochs=12, verbose=0)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    assert accuracy > 0.95
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model")
    assert loaded.evaluate(x, y, verbose=0) == [loss, accuracy]
    assert [layer.get_config() for layer in loaded.layers] == [
        layer.get_config() for layer in model.layers
    ]
    shapes = [layer.output_shape for layer in model.layers[:4]]
    expected = [(BATCH, 8, 8, 8), (BATCH, 8, 8, 8), (BATCH, 4, 4, 8), (BATCH, 3, 1, 8)]
    assert shapes == expected


def test_a_network_with_attention_learns_and_is_saved(tmp_path: Path) -> None:
    set_seed(4)
    x, y = RANDOM.integers(0, 8, (60, 6)), RANDOM.integers(0, 2, 60)
    model = Reader()
    model.compile(optim.Adam(0.01), "sparse_categorical_crossentropy", ["accuracy"])
    history = model.fit(x, y, batch_size=20, epochs=50, verbose=0).history
    assert history["accuracy"][-1] > 0.9
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model", custom_objects={"Reader": Reader})
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


@pytest.mark.parametrize("replicas", [2, 3])
def test_synchronized_statistics_make_replicas_one(replicas: int) -> None:
    x, y = _stripes(10)
    alone = _convolutional("float64", synchronized=True)
    wanted = alone.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    config.set_logical_devices("CPU", 4)
    strategy = MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        model = _convolutional("float64", synchronized=True)
    found = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def test_layers_compute_what_they_say() -> None:
    images, features = RANDOM.normal(size=(2, 6, 6, 4)), RANDOM.normal(2, 3, (5, 4))
    settings: Any = {"epsilon": 0.5, "dtype": "float64"}
    for norm, axis in ((nn.LayerNorm(**settings), -1), (nn.BatchNorm(**settings), 0)):
        norm(features)
        for variable in norm.variables:
            variable.assign(RANDOM.uniform(0.5, 2, 4))
        mean, variance = features.mean(axis, keepdims=True), features.var(axis, keepdims=True)
        if isinstance(norm, nn.BatchNorm):
            mean, variance = norm.moving_mean.numpy(), norm.moving_variance.numpy()
        scaled = (features - mean) / np.sqrt(variance + 0.5) * norm.gamma.numpy()
        np.testing.assert_allclose(norm(features).numpy(), scaled + norm.beta.numpy())
    scaled = (features - features.mean(0)) / np.sqrt(features.var(0) + 0.5) * norm.gamma.numpy()
    found = norm(features, training=True).numpy()
    np.testing.assert_allclose(found, scaled + norm.beta.numpy())

    conv = nn.Conv2D(3, 2, dilation_rate=(2, 1), activation="relu", dtype="float64")
    conv(images)
    conv.bias.assign([1.0, -1.0, 2.0])
    taps = [
        images[:, 2 * i : 2 * i + 4, j : j + 5] @ conv.kernel.numpy()[i, j]
        for i in (0, 1)
        for j in (0, 1)
    ]
    expected = np.maximum(sum(taps) + conv.bias.numpy(), 0)
    np.testing.assert_allclose(conv(images).numpy(), expected)
    blocks = images.reshape(2, 3, 2, 3, 2, 4)
    average, largest = nn.AveragePooling2D(dtype="float64"), nn.MaxPool2D(dtype="float64")
    np.testing.assert_allclose(average(images).numpy(), blocks.mean((2, 4)))
    np.testing.assert_array_equal(largest(images).numpy(), blocks.max((2, 4)))


def test_replicas_draw_and_look_up_as_one() -> None:
    x, y = RANDOM.integers(0, 9, (7, 5)), RANDOM.normal(size=(7, 1))
    config.set_logical_devices("CPU", 4)
    dtype: Any = {"dtype": "float64"}
    results = []
    for replicas, rate in ((1, 0.3), (2, 0.3), (1, 0.0)):
        set_seed(5)
        with MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).scope():
            attention = nn.MultiHeadAttention(2, 3, dropout=rate, causal=True, **dtype)
            layers = [nn.Embedding(9, 4, **dtype), attention, nn.Dropout(0.3, **dtype)]
            model = nn.Sequential([*layers, nn.Flatten(), nn.Dense(1, **dtype)], **dtype)
            model.compile(optim.SGD(0.1), "mse")
        losses = model.fit(x, y, batch_size=3, epochs=2, verbose=0).history["loss"]
        results.append([np.array(losses), *model.get_weights()])
    for one, two in zip(*results[:2], strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-9, atol=1e-12)
    assert not np.allclose(results[2][0], results[0][0])  # the attention drops, too


def test_moving_averages_are_those_of_all_replicas() -> None:
    config.set_logical_devices("CPU", 4)
    strategy = MirroredStrategy([f"CPU:{i}" for i in range(4)])
    with strategy.scope():
        set_seed(1)
        model = nn.Sequential([nn.BatchNorm(momentum=0.0, epsilon=0.1), nn.Dense(1)])
        model.compile("sgd", "mse")
    x = RANDOM.normal(2, 3, (6, 3)).astype(np.float32)
    model.fit(x, np.zeros((6, 1)), batch_size=6, shuffle=False, verbose=0)
    layer: Any = model.layers[0]
    shares = (x[:2], x[2:4], x[4:5], x[5:6])
    np.testing.assert_allclose(layer.moving_mean.numpy(), x.mean(axis=0), rtol=1e-5)
    variances = sum(len(share) * share.var(axis=0) for share in shares) / 6
    np.testing.assert_allclose(layer.moving_variance.numpy(), variances, rtol=1e-5)
    for storage in layer.moving_mean.storage[1:]:
        np.testing.assert_array_equal(storage, layer.moving_mean.storage[0])


def test_a_batch_norm_that_is_not_trainable_stays_as_it_is() -> None:
    layer = nn.BatchNorm(trainable=False, epsilon=0.5)
    x = RANDOM.normal(size=(4, 2)).astype(np.float32)
    found = layer(x, training=True).numpy()
    np.testing.assert_allclose(found, x / np.sqrt(1.5), rtol=1e-6)
    np.testing.assert_array_equal(layer.moving_mean.numpy(), np.zeros(2))


def test_a_batch_norm_in_what_is_frozen_stays_as_it_is() -> None:
    set_seed(1)
    base = nn.Sequential([nn.Dense(3), nn.BatchNorm()], trainable=False)
    model = nn.Sequential([base, nn.Dense(1)])
    model.compile("sgd", "mse")
    x = RANDOM.normal(2, 3, (8, 3)).astype(np.float32)
    model.build((None, 3))
    before = [value.copy() for value in base.get_weights()]
    model.fit(x, np.zeros((8, 1)), batch_size=4, verbose=0)
    for found, wanted in zip(base.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("synchronized", [False, True])
def test_a_step_without_samples_leaves_moving_averages(synchronized: bool) -> None:
    config.set_logical_devices("CPU", 4)
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = nn.BatchNorm(synchronized=synchronized)

    @function
    def step(x: Any) -> Any:
        return layer(x, training=True)

    x = RANDOM.normal(2, 3, (4, 3)).astype(np.float32)
    found = []
    for (batch,) in strategy.distribute_dataset([(x,), (x[:0],)]):
        strategy.run(step, args=(batch,))
        found.append((layer.moving_mean.numpy(), layer.moving_variance.numpy()))
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(found[1], found[0])


def test_layers_refuse_other_features_than_they_were_built_for() -> None:
    for layer in (nn.LayerNorm(), nn.BatchNorm()):
        layer(np.ones((2, 4)))
        with pytest.raises(ShapeError, match=r"takes inputs of shape \(…, 4\), but got \(2, 1\)"):
            layer(np.ones((2, 1)))


def test_a_model_of_indices_is_built_from_a_shape() -> None:
    model = nn.Sequential([nn.Embedding(8, 4)])
    with pytest.raises(UsageError, match=r"model.build\(shape, dtype='int64'\)"):
        model.build((None, 6))
    model.build((None, 6), dtype="int64")
    assert [variable.shape for variable in model.variables] == [(8, 4)]


def test_a_mask_of_three_axes_is_for_all_heads() -> None:
    layer = nn.MultiHeadAttention(2, 4)
    x = RANDOM.normal(size=(2, 3, 5))
    mask = RANDOM.uniform(size=(2, 3, 3)) < 0.5  # of which the first axis is the batch, not heads
    mask[..., 0] = True
    found = layer((x, x, None, mask)).numpy()
    np.testing.assert_array_equal(found, layer((x, x, None, mask[:, None])).numpy())
    for row in (0, 1):
        alone = layer((x[row : row + 1], x[row : row + 1], None, mask[row])).numpy()
        np.testing.assert_allclose(found[row : row + 1], alone, rtol=1e-5, atol=1e-6)


def test_attention_takes_a_mask_and_other_sequences() -> None:
    set_seed(2)
    layer = nn.MultiHeadAttention(3, 4, value_dim=5, causal=True)
    query, value = (RANDOM.normal(size=(2, n, 6)).astype(np.float32) for n in (4, 4))
    mask = np.ones((1, 1, 1, 4), bool)
    plain = layer((query, value)).numpy()
    assert plain.shape == query.shape
    np.testing.assert_array_equal(layer((query, value, None, mask)).numpy(), plain)
    value[:, 3] = 100  # which only the last query may see
    np.testing.assert_allclose(layer((query, value)).numpy()[:, :3], plain[:, :3], rtol=1e-5)
    assert not np.allclose(layer((query, value)).numpy()[:, 3], plain[:, 3])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: nn.Conv2D(0, 3), "filters of Conv2D is an integer from 1, not 0"),
        (lambda: nn.Conv2D(4, (3, 0)), "the kernel_size of Conv2D: sizes are 1 or more"),
        (lambda: nn.Conv2D(4, 3, padding="some"), "Conv2D takes padding 'valid' or 'same'"),
        (lambda: nn.Conv2D(4, 3)(np.ones((2, 8, 8))), r"width, channels\), but got \(2, 8, 8\)"),
        (lambda: nn.Conv2D(4, 3, groups=3)(np.ones((2, 8, 8, 3))), "multiples of 3 groups"),
        (lambda: nn.Conv2D(4, 9)(np.ones((2, 8, 8, 3))), "windows of 9×9 do not fit images of 8×8"),
        (lambda: nn.MaxPool2D(3)(np.ones((2, 2, 2, 1))), "windows of 3×3 do not fit"),
        (
            lambda: nn.BatchNorm(momentum=1.5),
            "momentum of BatchNorm is a finite number >= 0 and < 1",
        ),
        (lambda: nn.Embedding(4, 2)(np.array([1, -1])), "number -1 is outside of 0…3, the rows of"),
        (lambda: nn.Embedding(4, 2)([[1, 2]]), "one array, but got a list of 1; make one array"),
        (lambda: nn.Dense(2)((SEQUENCE, SEQUENCE)), "one array, but got a tuple of 2; .*Concat"),
        (lambda: nn.Dense(2)({"a": SEQUENCE}), "'dense' .Dense. takes one array, .* a dict of 'a'"),
        (lambda: nn.Reshape((9,))(None), "Reshape. takes one array, but got None; pass an array"),
        (
            lambda: nn.Sequential([nn.Input((3,)), nn.Dense(2)])({"rows": SEQUENCE[0]}),
            "'input' .Input. takes one array, but got a dict of 'rows'; pass one of its values",
        ),
        (lambda: nn.Embedding(4, 2)(np.ones(2)), "Embedding. takes integers, got float32; before"),
        (lambda: nn.MultiHeadAttention(2, 2)(np.ones((2, 3))), "takes queries of shape"),
        (lambda: nn.MultiHeadAttention(2, 2)(np.float32(1)), "takes queries of shape"),
        (lambda: nn.MultiHeadAttention(2, 2)((SEQUENCE, None)), "takes a value .batch, length"),
        (
            lambda: nn.MultiHeadAttention(2, 2)((SEQUENCE, SEQUENCE, np.ones((2, 3, 3), bool))),
            r"takes a key .* not bool\(2, 3, 3\); a mask comes fourth",
        ),
        (
            lambda: nn.MultiHeadAttention(4, 2)((SEQUENCE, SEQUENCE, None, np.ones((2, 7), bool))),
            r"'multi_head_attention.*' .* takes a mask .* here \(2, 4, 3, 3\), but got .* \(2, 7\)",
        ),
        (lambda: nn.GlobalAveragePooling2D()(SEQUENCE), "takes images .batch, height, width, chan"),
        (lambda: nn.LayerNorm(epsilon=0), "epsilon of LayerNorm is a .* > 0"),
        (lambda: nn.BatchNorm(epsilon=0.0), "epsilon of BatchNorm is a .* > 0"),
        (lambda: untyped.MultiHeadAttention("two", 2), "num_heads of Mul.* is an integer from 1"),
    ],
)
def test_what_a_layer_cannot_take_is_refused(call: Any, said: str) -> None:
    with pytest.raises((ShapeError, UsageError), match=said):
        call()


class Block(nn.Layer):
    """Makes its layer when it sees its inputs."""

    def build(self, input_shape: Any) -> None:
        self.inner = nn.Dense(input_shape[-1])

    def call(self, inputs: Tensor) -> Any:
        return self.inner(inputs)


def test_layers_that_a_layer_makes_in_build_belong_to_its_strategy() -> None:
    config.set_logical_devices("CPU", 4)
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = nn.Sequential(
            [nn.Embedding(5, 4), nn.MultiHeadAttention(2, 2), Block(), nn.Flatten(), nn.Dense(1)]
        )
        model.compile("sgd", "mse")
    model.fit(np.zeros((4, 3), int), np.zeros((4, 1)), batch_size=4, verbose=0)
    names = [variable.name for variable in model.variables]
    assert any(name.endswith("1/query/kernel") for name in names)
    assert any(name.endswith("2/inner/kernel") for name in names)


def test_where_a_number_is_out_of_range_is_said() -> None:
    model = nn.Sequential([nn.Embedding(8, 4), nn.Flatten(), nn.Dense(1)], name="words")
    model.compile("sgd", "mse")
    x = np.array([[1, 2], [3, 9]])
    said = r"test_layers.py:\d+: layer 'words/0': take: number 9 is outside of 0…7, the rows of .*"
    model.compile("sgd", "mse", run_eagerly=True)
    calls: Any = (lambda: model(x), lambda: model.predict(x, verbose=0))
    for call in calls:
        with pytest.raises(UsageError, match=rf"{said}position \(1, 1\) of \("):
            call()
    model.compile("sgd", "mse")
    said = "number 9 in row 1 of {} is out of range: layer 'words/0' has vectors for .* from 0 to 7"
    with pytest.raises(UsageError, match=said.format("x")):
        model.predict(x, verbose=0)
    with pytest.raises(UsageError, match=said.format("validation x")):
        model.fit(x % 8, x[:, :1], validation_data=(x, x[:, :1]), verbose=0)


def test_keras_names_of_layers_lead_to_ours() -> None:
    with pytest.raises(AttributeError, match="did you mean 'BatchNorm'"):
        untyped.BatchNormalization  # noqa: B018
    with pytest.raises(AttributeError, match=r"use ar\.nn\.Dense$"):
        untyped.layers.Dense(3)


def test_several_inputs_are_one_argument() -> None:
    x = np.ones((2, 3, 4))
    with pytest.raises(UsageError, match="several as a tuple; the second argument is training"):
        nn.MultiHeadAttention(2, 2)(x, x)  # type: ignore[arg-type]
