"""Arguments of a wrong type; switches such as "no", which Python takes for true, among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allreduce as ar

untyped: Any = ar
x = np.ones((4, 3), np.float32)


def _compiled() -> Any:
    model = ar.nn.Sequential([ar.nn.Input((3,)), ar.nn.Dense(1)])
    model.compile(loss="mse")
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda no: untyped.nn.Dense(2, use_bias=no), "use_bias"),
        (lambda no: untyped.nn.Dense(2, trainable=no), "trainable"),
        (lambda no: untyped.nn.Conv2D(2, 1, use_bias=no), "use_bias"),
        (lambda no: untyped.nn.MultiHeadAttention(2, 2, causal=no), "causal"),
        (lambda no: untyped.nn.GlobalAveragePooling2D(no), "keepdims"),
        (lambda no: untyped.nn.LayerNorm(center=no), "center"),
        (lambda no: untyped.nn.BatchNorm(synchronized=no), "synchronized"),
        (lambda no: untyped.nn.metrics.AUC(from_logits=no), "from_logits"),
        (lambda no: untyped.optim.SGD(0.1, 0.9, no), "nesterov"),
        (lambda no: untyped.optim.RMSprop(centered=no), "centered"),
        (lambda no: untyped.optim.schedules.ExponentialDecay(0.1, 9, 0.9, no), "staircase"),
        (lambda no: untyped.optim.schedules.PolynomialDecay(0.1, 9, cycle=no), "cycle"),
        (lambda no: untyped.callbacks.EarlyStopping(restore_best_weights=no), "restore_best_w"),
        (lambda no: untyped.callbacks.ModelCheckpoint("m", save_best_only=no), "save_best_only"),
        (lambda no: untyped.callbacks.CSVLogger("m", append=no), "append"),
        (lambda no: _compiled().evaluate(x, x[:, :1], verbose=0, return_dict=no), "return_dict"),
        (lambda no: _compiled().compile(run_eagerly=no), "run_eagerly"),
        (lambda no: _compiled().fit(x, x[:, :1], verbose=0, shuffle=no), "shuffle"),
        (lambda no: untyped.Variable(x, trainable=no), "trainable"),
        (lambda no: untyped.scan(lambda c, _: (c, None), 0.0, length=2, reverse=no), "reverse"),
        (lambda no: untyped.ops.cumsum(x, reverse=no), "reverse"),
        (lambda no: untyped.ops.sum(x, keepdims=no), "keepdims"),
        (lambda no: untyped.ops.gelu(x, no), "approximate"),
        (lambda no: untyped.ops.scaled_dot_product_attention(x, x, x, causal=no), "causal"),
        (lambda no: untyped.nn.losses.binary_crossentropy(x, x, no), "from_logits"),
        (lambda no: untyped.nn.losses.binary_focal_crossentropy(x, x, no), "apply_class_balancing"),
    ],
)
def test_switches_are_true_or_false(make: Any, name: str) -> None:
    with pytest.raises(ar.UsageError, match=rf"{name}.* is True or False, not 'no'"):
        make("no")
    for yes in (True, np.True_, 1):  # models were saved with 1
        make(yes)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: untyped.nn.metrics.Precision([[0.1], [0.2, 0.3]]), "thresholds are numbers from"),
        (lambda: untyped.nn.metrics.F1Score(np.ones(2)), "average is one of"),
        (lambda: untyped.optim.schedules.PiecewiseConstantDecay(1, [1, 2]), "boundaries is a list"),
        (
            lambda: untyped.optim.schedules.PiecewiseConstantDecay(["a"], [1, 2]),
            "a boundary is a f",
        ),
        (lambda: untyped.nn.Reshape(None), "a size of Reshape's target_shape is an integer from"),
        (lambda: untyped.nn.Input(1.5), "a size of Input's shape, .* is an integer from 1, not 1"),
        (lambda: untyped.ops.transpose(x, 1), "1 are not all of its axes"),
        (lambda: untyped.callbacks.EarlyStopping(None), "takes monitor, the name of a value"),
        (lambda: untyped.nn.Dense(1).add_variable("k", (1,), dtype="no"), "'no' is no dtype"),
        (lambda: untyped.optim.SGD().apply(None, []), "takes a list of gradients"),
        (
            lambda: _compiled().train_on_batch(x, x[:, :1], class_weight={"a": 1}),
            "class_weight is a dict from a class's number",
        ),
        (lambda: untyped.nn.Sequential(3), "Sequential takes a list of layers, not 3"),
        (lambda: _compiled().set_weights(None), "set_weights takes a list of arrays, one per var"),
        (lambda: _compiled().get_layer(index="0"), "index is an integer, not '0'"),
        (lambda: ar.optim.SGD().load_state(untyped), "load_state takes what state.. returned"),
        (lambda: untyped.callbacks.CSVLogger("m", separator=";;"), "separator .* one character"),
    ],
)
def test_values_of_another_type_are_refused_with_what_is_taken(make: Any, said: str) -> None:
    with pytest.raises(ar.UsageError, match=said):
        make()


def test_sizes_of_layers_may_be_integers_of_numpy() -> None:
    sizes = untyped.nn.Sequential(
        [untyped.nn.Input(np.int64(6)), untyped.nn.Reshape((np.int64(2), np.int32(-1)))]
    )
    assert sizes.get_config()["layers"][1]["config"]["target_shape"] == [2, -1]
    assert np.asarray(sizes(np.ones((1, 6)))).shape == (1, 2, 3)
