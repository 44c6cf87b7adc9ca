"""Functional models: calls of layers on Inputs, trained, shared, saved."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

import allreduce as ar
from allreduce.errors import ShapeError, UsageError
from allreduce.graph import set_seed
from tests.nn.common import blobs

nn: Any = ar.nn  # Model(inputs, outputs) makes another class than it says
LOSS = "sparse_categorical_crossentropy"


def two_by_two(loss: Any = None) -> Any:
    """Make a compiled model of two inputs and two outputs."""
    set_seed(0)
    left, right = nn.Input((4,), name="left"), nn.Input((2,), name="right")
    shared = nn.Dense(2, "tanh", name="shared")
    both = nn.Concatenate()([nn.Dense(6, "relu")(left), shared(right)])
    both = nn.Add()([both, nn.Dense(8)(both)])
    both = nn.Dropout(0.1)(nn.Flatten()(nn.Reshape((2, -1))(both)))
    mixed = nn.Add(name="mixed")([shared(right), nn.Dense(2)(both)])
    price, kind = nn.Dense(1, name="price")(mixed), nn.Dense(3, "softmax", name="kind")(both)
    model = nn.Model([left, right], [price, kind])
    loss = loss or {"price": "mse", "kind": LOSS}
    model.compile("adam", loss, {"kind": ["accuracy"]}, loss_weights=[0.1, 1.0])
    return model


def data() -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    x, y = blobs(60)
    return [x[:, :4], x[:, 4:]], {"price": x[:, :1], "kind": y}


def test_inputs_go_by_order_or_name_and_outputs_by_their_layers() -> None:
    (left, right), y = data()
    histories = []
    for x in ([left, right], (left, right), {"right": right, "left": left}):
        model = two_by_two()
        histories.append(model.fit(x, y, 16, 3, verbose=0).history)
    assert list(histories[0]) == ["loss", "price_loss", "kind_loss", "kind_accuracy"]
    assert histories[0] == histories[1] == histories[2]
    price, kind = model.predict([left, right], verbose=0)
    assert (price.shape, kind.shape) == ((60, 1), (60, 3))
    assert len(model.variables) == 12  # those of the shared layer once


def by_keys() -> Any:
    """Make a model of dicts, whose keys are not the names of the layers."""
    set_seed(0)
    inputs = {"u": nn.Input((2,), name="z"), "v": nn.Input((2,), name="a")}
    both = nn.Concatenate()([inputs["u"], inputs["v"]])
    model = nn.Model(inputs, {"q": nn.Dense(1)(both), "p": nn.Dense(1)(both)})
    model.compile("sgd", "mse", metrics={"p": ["mae"]})
    return model


def test_dicts_go_by_their_keys() -> None:
    model = by_keys()
    assert model.output_names == ["q", "p"]
    assert model.metrics_names == ["loss", "q_loss", "p_loss", "p_mae"]
    u, v = np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)
    history = model.fit({"v": v, "u": u}, {"p": u[:, :1], "q": v[:, :1]}, verbose=0).history
    assert list(history) == model.metrics_names
    found = model.predict({"v": v, "u": u}, verbose=0)
    swapped = model.predict(OrderedDict(v=v, u=u), verbose=0)
    np.testing.assert_array_equal(swapped["p"], found["p"])


def test_replicas_agree() -> None:
    x, y = data()
    losses = []
    for count in (1, 3):
        with MirroredStrategy([f"CPU:{index}" for index in range(count)]).scope():
            model = two_by_two()
        losses.append(model.fit(x, y, 16, 3, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_saved_models_go_on_where_they_stopped(tmp_path: Path) -> None:
    x, y = data()
    model = two_by_two()
    model.fit(x, y, 16, 2, verbose=0)
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model")
    assert loaded.output_names == ["price", "kind"]
    for here, there in zip(model.predict(x, verbose=0), loaded.predict(x, verbose=0), strict=True):
        np.testing.assert_array_equal(here, there)
    assert model.fit(x, y, 16, 2, verbose=0).history == loaded.fit(x, y, 16, 2, verbose=0).history


def test_models_are_layers_and_share_their_layers(tmp_path: Path) -> None:
    x, y = blobs(60)
    inputs = nn.Input((6,))
    encoder = nn.Model(inputs, nn.Dense(4, "tanh")(inputs), name="encoder")
    head = nn.Sequential([nn.Dense(3, "softmax")])
    model = nn.Model(inputs, head(encoder(inputs)))
    assert encoder.outputs[0].shape == (None, 4)
    encoder.trainable = False
    model.compile("sgd", LOSS)
    before = encoder.predict(x, verbose=0)
    model.fit(x, y, 16, 3, verbose=0)
    np.testing.assert_array_equal(encoder.predict(x, verbose=0), before)
    np.testing.assert_allclose(
        head.predict(before, verbose=0), model.predict(x, verbose=0), rtol=1e-6
    )
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    inner = nn.Model(inputs, encoder.layers[0].output)
    np.testing.assert_array_equal(inner.predict(x, verbose=0), before)


def test_it_computes_as_a_sequential_does() -> None:
    x, y = blobs(60)
    inputs = nn.Input((6,))
    hidden = nn.Dense(8, "tanh")
    last = nn.Dense(3, "softmax")
    model = nn.Model(inputs, last(hidden(inputs)))
    same = nn.Sequential([nn.Dense(8, "tanh"), nn.Dense(3, "softmax")])
    same.build((None, 6))
    same.set_weights(model.get_weights())
    histories = []
    for each in (model, same):
        each.compile(ar.optim.SGD(0.1), LOSS)
        histories.append(each.fit(x, y, 16, 3, shuffle=False, verbose=0).history)
    assert histories[0] == histories[1]
    model.summary()


def _unconnected() -> Any:
    return nn.Model(nn.Input((2,), name="other"), nn.Dense(1)(nn.Input((3,), name="lost")))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (_unconnected, UsageError, "depend on the input <symbol 'lost' float32 .batch, 3.>, which"),
        (lambda: nn.Model(nn.Input((2,)), 3), UsageError, "outputs of a functional model are"),
        (
            lambda: nn.Dense(2)(nn.Input((3,))) + 1,
            UsageError,
            "has no value: layers take it, such as ar.nn.Add",
        ),
        (lambda: ar.ops.relu(nn.Dense(2)(nn.Input((3,)))), UsageError, "has no value"),
        (
            lambda: nn.Add()([nn.Input((3,)), nn.Input((4,))]),
            ShapeError,
            r"layer 'add' takes inputs of one shape, but got \(batch, 3\) and \(batch, 4\)",
        ),
        (lambda: nn.Add()(nn.Input((3,))), UsageError, "takes a list of at least two"),
        (
            lambda: nn.Reshape((2, 2))(nn.Input((3,))),
            ShapeError,
            r"layer 'reshape' cannot give \(batch, 3\) the shape \(batch, 2, 2\): .* 3 elements",
        ),
        (lambda: nn.Concatenate(axis=0), UsageError, "an axis other than the batch"),
        (lambda: nn.Concatenate(1)([nn.Input((3, 4)), nn.Input((3, 5))]), ShapeError, "concatena"),
        (lambda: two_by_two().predict(np.ones((3, 4))), UsageError, r"2 inputs \(left, right\)"),
        (
            lambda: two_by_two().predict({"left": np.ones((3, 4)), "r": np.ones((3, 2))}),
            UsageError,
            "inputs called left, right, not left, r",
        ),
        (
            lambda: by_keys().predict({"x": np.ones((3, 2)), "y": np.ones((3, 2))}),
            UsageError,
            "inputs called u, v, not x, y",
        ),
        (
            lambda: two_by_two().predict([np.ones((3, 4)), np.ones((3, 5))]),
            ShapeError,
            r"input 'right' of model .* takes \(batch, 2\), but got \(batch, 5\)",
        ),
        (
            lambda: two_by_two().fit(data()[0], {"price": np.ones(60), "sort": np.ones(60)}),
            UsageError,
            "the model's outputs are 'price', 'kind'",
        ),
        (
            lambda: two_by_two(loss={"prize": "mse"}).fit(*data()),
            UsageError,
            "'prize', but the model's outputs are 'price', 'kind'; did you mean 'price'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, kind: type[Exception], message: str) -> None:
    set_seed(0)
    with pytest.raises(kind, match=message):
        call()


def test_models_without_a_constructor_of_their_own_are_saved(tmp_path: Path) -> None:
    class Plain(nn.Model):  # type: ignore[misc]
        def build(self, input_shape: Any) -> None:
            self.add_variable("factor", (1,), "ones")

        def call(self, inputs: Any) -> Any:
            return inputs * self.factor

    model = Plain(name="plain")
    model.build((None, 2))
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model", {"Plain": Plain})
    np.testing.assert_array_equal(loaded.predict(np.ones((1, 2)), verbose=0), [[1, 1]])
    assert list(inspect.signature(Plain).parameters) == ["name", "dtype", "trainable"]


def test_lists_give_each_output_its_own_at_compile() -> None:
    a = nn.Input((6,))
    model = nn.Model(a, [nn.Dense(1, "sigmoid", name="kind")(a), nn.Dense(1, name="price")(a)])
    model.compile("sgd", ["bce", "mse"], [["mae"], ["mse"]], loss_weights=[1.0, 0.5])
    names = ["loss", "kind_loss", "price_loss", "kind_mae", "price_mse"]
    assert model.metrics_names == names
    x, labels = blobs(40)
    y = [(labels[:, None] > 0).astype("f"), x[:, :1]]
    found = model.fit(x, y, verbose=0).history
    assert list(found) == names
    total = found["kind_loss"][0] + 0.5 * found["price_loss"][0]
    assert found["loss"][0] == pytest.approx(total, rel=1e-6)
    with pytest.raises(UsageError, match="loss has 3 entries, but the model has 2 outputs"):
        model.compile("sgd", ["bce", "mse", "mse"])


def test_lists_wait_for_the_outputs_of_a_subclass() -> None:
    class Two(ar.nn.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Dense(1), nn.Dense(1)

        def call(self, x: Any) -> Any:
            return self.first(x), self.second(x)

    model = Two()
    model.compile("sgd", ["mse", "mae"], [["mae"], "mse"], loss_weights=[1.0, 0.5])
    x, _ = blobs(40)
    found = model.fit(x, [x[:, :1], x[:, 1:2]], verbose=0).history
    names = ["loss", "output_0_loss", "output_1_loss", "output_0_mae", "output_1_mse"]
    assert list(found) == names


@pytest.mark.parametrize("outputs", ["alone", "in a list"])
def test_a_single_output_takes_arrays_dicts_and_lists(outputs: str) -> None:
    x, _ = blobs(40)
    targets = (x[:, :1] > 0).astype("float32")
    histories = []
    for loss, metrics, y in (
        ("mse", ["mae"], targets),
        (["mse"], [["mae"]], [targets]),
        ({"price": "mse"}, {"price": ["mae"]}, {"price": targets}),
        ({"price": "mse"}, {"price": "mae"}, targets),
    ):
        set_seed(0)
        a = nn.Input((6,))
        out = nn.Dense(1, name="price")(a)
        model = nn.Model(a, out) if outputs == "alone" else nn.Model([a], [out])
        model.compile("sgd", loss, metrics)
        options: Any = {"validation_data": (x, y), "class_weight": {1: 3.0}}
        histories.append(model.fit(x, y, verbose=0, **options).history)
    assert list(histories[0]) == ["loss", "mae", "val_loss", "val_mae"]
    assert all(history == histories[0] for history in histories)
    assert histories[0]["loss"][0] > 1.2 * histories[0]["val_loss"][0]  # weighted
    with pytest.raises(UsageError, match="y is a dict of 'prise', but the model's outputs are 'p"):
        model.fit(x, {"prise": x[:, :1]}, verbose=0)
    with pytest.raises(UsageError, match=r"loss names output 'prise'.*did you mean 'price'"):
        model.compile("sgd", {"prise": "mse"})
    with pytest.raises(UsageError, match="loss_weights has 2 entries, but the model has one"):
        model.compile("sgd", "mse", loss_weights=[1, 2])


@pytest.mark.parametrize(
    ("make", "found"),
    [(lambda y: {"z": y}, "a dict of 'z'"), (lambda y: [y, y], "a list of 2 arrays")],
)
def test_several_targets_of_a_single_output_are_refused(make: Any, found: str) -> None:
    x, y = np.ones((8, 4)), np.ones((8, 1))
    model = nn.Sequential([nn.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match=f"^y is {found}, but the model has one output, which has"):
        model.fit(x, make(y), verbose=0)
    with pytest.raises(UsageError, match=r"^sample_weight is a dict of 'z', but .* give one array"):
        model.fit(x, y, sample_weight={"z": np.ones(8)}, verbose=0)
    model.compile("sgd", lambda y_true, y_pred: ar.ops.square(y_true["z"] - y_pred))
    model.fit(x, {"z": y}, verbose=0)  # a user's own loss may take a dict


def test_an_output_has_one_metric_without_a_list() -> None:
    x, y = data()
    model = two_by_two()
    model.compile("adam", {"price": "mse", "kind": LOSS}, {"kind": "accuracy", "price": ["mae"]})
    names = ["loss", "price_loss", "kind_loss", "price_mae", "kind_accuracy"]
    assert list(model.fit(x, y, verbose=0).history) == names
    with pytest.raises(UsageError, match=r"metrics is a list: \['mae'\]"):
        nn.Model(model.inputs, model.outputs[0]).compile("sgd", "mse", "mae")
