"""Models: how they are put together, named, built and described."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import nn, optim
from allreduce.errors import ShapeError, UsageError
from allreduce.graph import Replicator, scope_of, set_seed
from tests.nn.common import blobs, classifier


class Residual(nn.Model):
    """A subclassed model with layers as attributes and in a list."""

    def __init__(self, blocks: int = 2, name: str | None = None) -> None:
        super().__init__(name=name)
        self.blocks = [nn.Dense(6, activation="relu") for _ in range(blocks)]
        self.head = nn.Dense(3, activation="softmax")
        self.seen_training: list[bool] = []

    def call(self, x: Any, training: bool = False) -> Any:
        self.seen_training.append(training)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_variables_are_named_by_where_their_layer_stands() -> None:
    set_seed(0)
    model = nn.Sequential([nn.Flatten(), nn.Dense(4), nn.Sequential([nn.Dense(2)])])
    model.build((None, 2, 3))
    assert [v.name for v in model.variables] == [
        "sequential_1/1/kernel",
        "sequential_1/1/bias",
        "sequential_1/2/0/kernel",
        "sequential_1/2/0/bias",
    ]
    subclassed = Residual(name="net")
    subclassed.build((None, 6))
    assert [v.name for v in subclassed.variables] == [
        "net/blocks/0/kernel",
        "net/blocks/0/bias",
        "net/blocks/1/kernel",
        "net/blocks/1/bias",
        "net/head/kernel",
        "net/head/bias",
    ]
    assert [v.shape for v in subclassed.variables[-2:]] == [(6, 3), (3,)]
    assert subclassed.count_params() == 2 * (36 + 6) + 18 + 3


def test_initial_values_depend_on_seed_and_path_only() -> None:
    def first_kernel(seed: int, *, input_first: bool = False, name: str | None = None) -> Any:
        set_seed(seed)
        layers: list[Any] = [nn.Input((5,))] if input_first else []
        model = nn.Sequential([*layers, nn.Dense(7)], name=name)
        model.build((None, 5))
        return model.get_weights()[0]

    kernel = first_kernel(3)
    assert np.array_equal(kernel, first_kernel(3))
    assert np.array_equal(kernel, first_kernel(3, input_first=True))
    assert not np.array_equal(kernel, first_kernel(4))
    assert not np.array_equal(kernel, first_kernel(3, name="other"))
    assert np.abs(kernel).max() <= np.sqrt(6 / 12)  # glorot_uniform


def test_a_subclassed_model_trains_and_is_told_when() -> None:
    x, y = blobs()
    model = Residual()
    rule = optim.Adam(0.02)
    model.compile(optimizer=rule, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, epochs=30, verbose=0)
    assert model.evaluate(x, y, verbose=0)[1] > 0.9
    assert {True, False} == set(model.seen_training)


def test_frozen_layers_keep_their_values() -> None:
    x, y = blobs()
    model = classifier()
    model.layers[0].trainable = False
    model.build((None, 6))
    before = model.get_weights()
    assert len(model.trainable_variables) == 2
    model.fit(x, y, epochs=1, verbose=0)
    after = model.get_weights()
    same = [bool(np.array_equal(a, b)) for a, b in zip(before, after, strict=True)]
    assert same == [True, True, False, False]


def test_set_weights_changes_what_predict_gives() -> None:
    x, _ = blobs(10)
    one = classifier(seed=1)
    expected = one.predict(x, verbose=0)
    other = classifier(seed=2)
    assert not np.array_equal(other.predict(x, verbose=0), expected)
    other.set_weights(one.get_weights())
    assert np.array_equal(other.predict(x, verbose=0), expected)
    with pytest.raises(UsageError, match="has 4 variables, but 1 weights"):
        other.set_weights([np.ones(3)])
    wrong = one.get_weights()
    wrong[1] = np.ones(5)
    with pytest.raises(ShapeError, match=r"0/bias' has shape \(16,\).*\(5,\)"):
        other.set_weights(wrong)


def test_a_shape_error_in_a_models_call_keeps_its_place_in_fit() -> None:
    class Even(nn.Model):
        def call(self, x: Any) -> Any:
            raise ShapeError("the rows must be even")

    model = Even()
    model.compile("sgd", "mse")
    x = np.ones((4, 2), np.float32)
    with pytest.raises(ShapeError, match=r"must be even \(x has shape \(4, 2\)") as caught:
        model.fit(x, x, verbose=0)
    assert caught.traceback[-1].name == "call"
    assert caught.traceback[-1].path == Path(__file__)


def test_summary_shows_layers_shapes_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    model = classifier()
    model.summary()
    assert "not built yet" in capsys.readouterr().out
    model.build((None, 6))
    model.summary()
    printed = capsys.readouterr().out
    assert "0 (Dense)" in printed
    assert "(batch, 16)" in printed
    assert "112" in printed
    assert "parameters: 163 (163 trainable)" in printed
    named = nn.Sequential([nn.Input((2,)), nn.Dense(1, name="head")])
    named.summary()
    assert "0 (Dense 'head')" in capsys.readouterr().out


class HidesItsLayer(nn.Model):
    def call(self, x: Any) -> Any:
        return nn.Dense(3)(x)


def _added_to_itself() -> None:
    model = nn.Sequential([nn.Dense(3)])
    model.add(nn.Sequential([model]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.Sequential([nn.Dense]), r"make one: Dense\(…\)"),  # type: ignore[list-item]
        (lambda: nn.Sequential([nn.Dense(2), nn.Input((3,))]), "Input stands first"),
        (lambda: nn.Sequential(nn.Dense(2)), r"takes a list of layers: \[Dense"),  # type: ignore[arg-type]
        (lambda: _added_to_itself(), "cannot be a layer of itself"),
        (
            lambda: nn.Sequential([nn.Dense(2)]).build(6),
            r"build takes \(None, features, …\), not 6",
        ),
        (lambda: nn.Input((3,), dtype="flot"), "Input takes .* dtype .* not 'flot'"),
        (lambda: nn.Sequential([])(np.ones((1, 2))), "has no layers"),
        (lambda: nn.Dense(0), "units of Dense is an integer from 1"),
        (lambda: nn.Dropout(1.0), "rate of Dropout is a finite number >= 0 and < 1"),
        (lambda: nn.Input((None, 3)), "without the batch"),  # type: ignore[arg-type]
        (lambda: nn.Dense(3, dtype="float16"), "unknown dtype"),
        (lambda: HidesItsLayer()(np.ones((1, 2))), "not one of its attributes"),
        (lambda: nn.Sequential([nn.Dense(1)]).get_weights(), "has no variables yet"),
        (lambda: nn.Sequential([nn.Dense(1)]).fit([[1.0]], [1.0]), "is not compiled"),
        (lambda: nn.Sequential([nn.Dense(1)]).compile("sgd", "mse", "mse"), "is a list"),
        (
            lambda: nn.Sequential([nn.Dense(1)]).compile("sgd", "mse", ["mse", "mse"]),
            "two metrics called 'mse'",
        ),
        (
            lambda: nn.Sequential().compile("sgd", "mse", [nn.metrics.Accuracy("val_loss")]),
            "'val_loss', but histories give what begins with val_",
        ),
        (
            lambda: nn.Sequential().compile({"name": "sgd", "config": {"lr": 1}}, "mse"),
            "SGD takes no lr=: the argument is called learning_rate=",
        ),
        (
            lambda: nn.losses.SparseCategoricalCrossentropy(from_logits="no"),  # type: ignore[arg-type]
            "from_logits is True or False",
        ),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_layers_refuse_inputs_they_were_not_built_for() -> None:
    layer = nn.Dense(2)
    layer(np.ones((1, 3)))
    with pytest.raises(ShapeError, match=r"takes inputs of shape \(…, 3\), but got \(1, 4\)"):
        layer(np.ones((1, 4)))
    with pytest.raises(ShapeError, match=r"\(batch, …, features\), but got \(3,\)"):
        nn.Dense(2)(np.ones(3))
    model = nn.Sequential([nn.Input((3,)), nn.Dense(2)])
    with pytest.raises(ShapeError, match=r"Input takes \(batch, 3\), but got \(batch, 4\)"):
        model.predict(np.ones((5, 4)))


def test_a_layer_from_another_scope_is_refused_with_both_places() -> None:
    outside = nn.Dense(3)
    with scope_of(Replicator()):
        model = nn.Sequential([outside])
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match="'dense' was made outside of any strategy's scope"):
        model.fit(np.ones((2, 3)), np.ones((2, 3)), verbose=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.array(["a"] * 3), "holds float32, but the value given for it <U1"),
        ([[1.0], [1.0, 2.0]], "is no array"),
        (np.ones(3, complex), "complex128"),
    ],
)
def test_set_weights_changes_all_or_none(wrong: Any, message: str) -> None:
    model = classifier()
    model.build((None, 6))
    before = model.get_weights()
    with pytest.raises(UsageError, match=message):
        model.set_weights([*(weight + 1 for weight in before[:-1]), wrong])
    assert all(np.array_equal(*pair) for pair in zip(model.get_weights(), before, strict=True))


def test_layers_are_added_until_the_model_is_used() -> None:
    x = np.ones((8, 3), np.float32)
    model = nn.Sequential()
    for layer in (nn.Input((3,)), nn.Dense(4), nn.Dense(2)):
        model.add(layer)
    assert model.predict(x, verbose=0).shape == (8, 2)
    with pytest.raises(UsageError, match="has been built, called or trained already"):
        model.add(nn.Dense(1))
    lazy = nn.Sequential([nn.Dense(4)])
    lazy.add(nn.Dense(2))
    lazy.build((None, 3))
    with pytest.raises(UsageError, match="has been built"):
        lazy.add(nn.Dense(1))
    assert lazy.predict(x, verbose=0).shape == (8, 2)


def test_layers_that_forget_what_python_lets_them_forget_are_told_so() -> None:
    class Unmade(nn.Layer):
        def __init__(self) -> None:
            pass

    class Around(nn.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Unmade()

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

    class Without(nn.Model):
        def __init__(self) -> None:
            self.inner = nn.Dense(1)

    class Mute(nn.Layer):
        def call(self, inputs: Any) -> None:
            inputs * 2.0

    with pytest.raises(
        AttributeError, match=r"Without.__init__ has to call super\(\).__init__\(\)"
    ):
        Without().summary()
    assert not hasattr(Around(), "nothing")
    with pytest.raises(AttributeError, match=r"Unmade\.__init__ has to call"):
        Around().predict(np.ones((2, 3), np.float32))
    x = np.ones((2, 3), np.float32)
    for use in (lambda: Without().compile("sgd", "mse"), lambda: Without().predict(x)):
        with pytest.raises(AttributeError, match=r"Without\.__init__ has to call"):
            use()
    with pytest.raises(UsageError, match=r"layer '.*/0' gave None; return .* from Mute.call"):
        nn.Sequential([Mute()]).predict(np.ones((2, 3), np.float32))


def test_a_model_lists_its_metrics_as_histories_name_them() -> None:
    inputs: Any = nn.Input((4,))
    outputs = [nn.Dense(1, name="price")(inputs), nn.Dense(3, "softmax", name="kind")(inputs)]
    model = nn.Functional(inputs, outputs)
    losses = {"price": "mse", "kind": "sparse_categorical_crossentropy"}
    model.compile("sgd", losses, {"price": ["mae"], "kind": ["accuracy", nn.metrics.Mean("twos")]})
    names = ["loss", "price_loss", "kind_loss", "price_mae", "kind_accuracy", "kind_twos"]
    assert model.metrics_names == names
    assert [each.name for each in model.metrics] == ["price_mae", "kind_accuracy", "twos"]
    assert model.metrics[0] is model.metrics[0]


def test_a_step_as_keras_has_it_says_how_metrics_are_returned() -> None:
    class Own(nn.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
            self.optimizer.minimize(loss, self.trainable_variables)
            for metric in self.metrics:
                metric.update_state(y, y_pred)
            return {"loss": loss}

    for eagerly in (False, True):
        model = Own([nn.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=eagerly)
        assert model.metrics_names == ["loss", "mae"]
        with pytest.raises(UsageError, match=r"metric 'mae' cannot .*self\.compute_metrics\(x, y,"):
            model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)


def test_a_loss_without_predictions_names_the_order_of_its_arguments() -> None:
    class Own(nn.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            return {"loss": self.compute_loss(y, self(x))}

    model = Own([nn.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match=r"test_model.py:\d+: compute_loss got no y_pred; .* is x"):
        model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)


def test_batches_that_are_no_pairs_are_named_by_what_is_in_them() -> None:
    model = nn.Sequential([nn.Dense(1)])
    model.compile("sgd", "mse")
    batch = {"rows": np.ones((8, 2)), "prices": np.ones((8, 1))}
    said = r"got a list of 1; .* \(x\[0\]\['prices'\] has shape \(8, 1\) and x\[0\]\['rows'\]"
    with pytest.raises(ShapeError, match=said):
        model.fit([batch], np.ones((8, 1)), verbose=0)


def test_a_layer_is_found_by_its_name_or_place() -> None:
    model = nn.Sequential([nn.Dense(2, name="first"), nn.Dense(2), nn.Dense(1)], name="m")
    assert model.get_layer("first") is model.get_layer(index=0) is model.layers[0]
    assert model.get_layer(index=-1) is model.layers[2]
    there = "there are 0 'first', 1 'dense', 2 'dense'"
    with pytest.raises(UsageError, match=rf"'m' has no layers of the name 'second': {there}"):
        model.get_layer("second")
    with pytest.raises(UsageError, match=rf"has 2 layers of the name 'dense': {there}; .* index="):
        model.get_layer("dense")
    with pytest.raises(UsageError, match=rf"has no layers of index 3: {there}"):
        model.get_layer(index=3)
    with pytest.raises(UsageError, match="a layer's name or its index"):
        model.get_layer()
