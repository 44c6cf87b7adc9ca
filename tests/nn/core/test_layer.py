"""Layers: what they compute in, what they keep, and which variables they find."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from allreduce import nn, optim
from allreduce.devices import options
from allreduce.errors import UsageError
from allreduce.graph import Variable, set_seed


@pytest.mark.parametrize("name", ["he_normal", "glorot_normal"])
def test_normal_initializers_have_their_deviation_and_are_cut_off(name: str) -> None:
    set_seed(0)
    values = nn.initializers.get(name)((200, 300), np.dtype("float64"), "path")
    deviation = np.sqrt(2 / 200 if name == "he_normal" else 2 / 500)
    assert abs(values.std() / deviation - 1) < 0.02
    assert np.abs(values).max() <= 2 * deviation / 0.8796 * 1.001


def test_dtypes_follow_floatx_and_inputs_are_cast() -> None:
    options.set_floatx("float64")
    try:
        layer = nn.Dense(2)
    finally:
        options.set_floatx("float32")
    assert layer(np.ones((1, 3), np.float32)).dtype == np.float64
    assert nn.Dense(2)(np.ones((1, 3), np.float64)).dtype == np.float32
    assert nn.Dense(2)(np.ones((1, 3), np.uint8)).dtype == np.float32


def test_dropout_works_in_training_alone() -> None:
    layer = nn.Dropout(0.5)
    x = np.ones((4, 1000), np.float32)
    assert np.array_equal(layer(x).numpy(), x)
    dropped = layer(x, training=True).numpy()
    assert set(np.unique(dropped)) == {0.0, 2.0}
    assert 0.4 < (dropped == 0).mean() < 0.6
    model = nn.Sequential([nn.Dropout(0.5)])
    assert np.array_equal(model.predict(x, verbose=0), x)


class Listed(nn.Layer):
    """Holds variables in a list and a dict, and knows the layer around it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [Variable(np.ones((3, 1), np.float32), name="weight")]
        self.shifts = {"one": Variable(np.zeros(1, np.float32), name="shift")}
        self.owner: nn.Layer | None = None

    def call(self, x: Any) -> Any:
        return x @ self.weights[0] + self.shifts["one"]


def test_variables_in_lists_and_dicts_are_trained_and_saved() -> None:
    layer = Listed()
    model = nn.Sequential([nn.Input((3,)), layer])
    layer.owner = model
    model.compile(optim.SGD(0.1), "mse")
    assert list(model.named_variables()) == ["0/weights/0", "0/shifts/one"]
    model.fit(np.ones((4, 3), np.float32), np.zeros((4, 1)), verbose=0)
    weights, shift = model.get_weights()
    assert (weights != 1).all()
    assert (shift != 0).all()


class Named(nn.Layer):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def build(self, input_shape: Any) -> None:
        for name in self.names:
            self.add_variable(name, (2,))

    def call(self, x: Any) -> Any:
        return x


class Shaped(nn.Layer):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.shape = shape

    def build(self, input_shape: Any) -> None:
        self.add_variable("w", input_shape if self.shape == "inputs" else self.shape)

    def call(self, x: Any) -> Any:
        return x


def test_the_shape_of_a_variable_has_sizes_from_0() -> None:
    refused: tuple[Any, ...] = (("a", 2), (-1, 2), (2.5,), None)
    for shape in refused:
        said = (
            rf"test_layer.py:\d+: the shape of variable '\w+/w' is .* not {re.escape(repr(shape))}"
        )
        with pytest.raises(UsageError, match=said):
            Shaped(shape)(np.ones((1, 3)))
    model = nn.Sequential([Shaped("inputs")])
    with pytest.raises(UsageError, match="the size batch is known only when the step runs"):
        model.build((None, 3))
    taken: tuple[Any, ...] = (3, [np.int64(2), 1], ())
    for shape, expected in zip(taken, ((3,), (2, 1), ()), strict=True):
        layer = Shaped(shape)
        layer(np.ones((1, 3)))
        assert [each.shape for each in layer.variables] == [expected]


@pytest.mark.parametrize("names", [("w", "w"), ("w", "name"), ("call",)])
def test_a_variable_takes_no_other_attributes_place(names: tuple[str, ...]) -> None:
    layer = Named(*names)
    for _ in range(2):  # what the first attempt made is not in the way of the second
        with pytest.raises(UsageError, match=f"has an attribute '{names[-1]}' already"):
            layer(np.ones((1, 3)))
    assert layer.variables == []
