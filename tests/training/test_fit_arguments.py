"""The arguments of `fit`, `evaluate` and the methods on single batches, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

import allreduce as ar
from allreduce import nn, optim
from allreduce.errors import ShapeError, UsageError
from allreduce.graph import set_seed
from tests.nn.common import blobs, classifier

untyped: Any = nn
LOSS = "sparse_categorical_crossentropy"


def on_replicas(count: int, **settings: Any) -> nn.Sequential:
    with MirroredStrategy([f"CPU:{index}" for index in range(count)]).scope():
        return classifier(**settings)


def test_validation_split_takes_the_last_rows() -> None:
    x, y = blobs(50)
    split, apart = classifier(), classifier()
    one = split.fit(x, y, 16, 2, validation_split=0.3, verbose=0).history
    tests = (x[35:], y[35:])
    assert one == apart.fit(x[:35], y[:35], 16, 2, validation_data=tests, verbose=0).history


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_weights_of_samples_and_classes_multiply_losses(replicas: int) -> None:
    x, y = blobs(50)
    weights = {0: 3.0, 2: 0.5, 7: 9.0}  # there is no class 7; class 1 counts 1
    each = np.select([y == 0, y == 2], [3.0, 0.5], 1.0)
    by_class = on_replicas(replicas).fit(x, y, 16, 2, verbose=0, class_weight=weights)
    model = on_replicas(replicas)
    by_sample = model.fit(
        *(x, y, 16, 2), verbose=0, sample_weight=each, validation_data=(x, y, each)
    )
    np.testing.assert_allclose(by_class.history["loss"], by_sample.history["loss"], rtol=1e-6)
    measured = model.evaluate(x, y, sample_weight=each, verbose=0)
    assert measured[0] == pytest.approx(by_sample.history["val_loss"][-1], rel=1e-6)
    shares = model.predict(x, verbose=0)
    expected = (each * -np.log(shares[np.arange(50), y])).mean()
    np.testing.assert_allclose(measured[0], expected, rtol=1e-5)
    one_hot = classifier()
    one_hot.compile(optim.Adam(0.01), "categorical_crossentropy")
    hot = one_hot.fit(x, np.eye(3)[y], 16, 2, verbose=0, class_weight=weights)
    np.testing.assert_allclose(hot.history["loss"], by_class.history["loss"], rtol=1e-5)


def test_a_weighted_metric_stands_beside_the_unweighted_one() -> None:
    x, y = blobs(50)
    model = classifier()
    model.compile(
        "sgd", "sparse_categorical_crossentropy", ["accuracy"], weighted_metrics=["accuracy"]
    )
    found = model.evaluate(x, y, sample_weight=(y == 0), verbose=0, return_dict=True)
    right = model.predict(x, verbose=0).argmax(axis=1) == y
    assert list(found) == ["loss", "accuracy", "weighted_accuracy"]
    assert found["accuracy"] == pytest.approx(right.mean())
    assert found["weighted_accuracy"] == pytest.approx(right[y == 0].mean())


def test_epochs_begin_and_validate_where_they_are_told() -> None:
    x, y = blobs(40)
    model = classifier()
    history = model.fit(
        *(x, y, 16, 6), initial_epoch=2, validation_data=(x, y), validation_freq=2, verbose=0
    )
    assert history.epoch == [2, 3, 4, 5]
    assert len(history.history["val_loss"]) == 2
    whole: Any = (np.int64(2), [np.int64(3)])
    for freq in (*whole, [3]):
        more = model.fit(x, y, epochs=3, validation_data=(x, y), validation_freq=freq, verbose=0)
        assert len(more.history["val_loss"]) == 1
    size: dict[str, Any] = {"validation_batch_size": 7, "validation_steps": 2}
    part = model.fit(x, y, 40, validation_data=(x, y), **size, verbose=0).history
    assert part["val_loss"][0] == pytest.approx(model.evaluate(x[:14], y[:14], verbose=0)[0])


def test_epochs_of_some_steps_go_on_in_the_data() -> None:
    x = np.arange(10, dtype=np.float32)[:, None]
    seen: list[Any] = []
    model = nn.Sequential([nn.Dense(1)])
    model.compile("sgd", "mse")
    step = model.replicator.run

    def spy(fn: Any, args: Any = (), kwargs: Any = None, *, eagerly: bool = False) -> Any:
        seen.append(args[0].values[0][:, 0].tolist())
        return step(fn, args, kwargs, eagerly=eagerly)

    model.replicator.run = spy  # type: ignore[method-assign]
    try:
        model.fit(x, x, 3, 2, steps_per_epoch=3, shuffle=False, verbose=0)
    finally:
        del model.replicator.run
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9], [0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("replicas", [1, 3])
def test_steps_on_single_batches(replicas: int) -> None:
    x, y = blobs(40)
    model, fitted = on_replicas(replicas), on_replicas(replicas)
    before = model.test_on_batch(x, y)
    assert model.train_on_batch(x, y, return_dict=True)["loss"] == before[0]
    assert fitted.fit(x, y, 40, shuffle=False, verbose=0).history["loss"] == before[:1]
    np.testing.assert_allclose(model.predict_on_batch(x), fitted.predict(x, verbose=0), rtol=1e-5)
    halved = model.test_on_batch(x, y, sample_weight=np.full(40, 0.5))
    assert halved[0] == pytest.approx(model.test_on_batch(x, y)[0] / 2)


@pytest.mark.parametrize("replicas", [1, 3])
def test_steps_on_single_batches_accumulate(replicas: int) -> None:
    x, y = blobs(48)
    models = [on_replicas(replicas) for _ in range(3)]
    by_steps, in_fit, stopped = models
    for model in models:
        model.compile(optim.SGD(0.1), LOSS, gradient_accumulation=4)
    by_steps.build((None, 6))
    before = by_steps.get_weights()
    for at in range(0, 48, 12):
        for kept, found in zip(before, by_steps.get_weights(), strict=True):
            np.testing.assert_array_equal(kept, found)
        by_steps.train_on_batch(x[at : at + 12], y[at : at + 12])
    in_fit.fit(x, y, 12, shuffle=False, verbose=0)
    for found, expected in zip(by_steps.get_weights(), in_fit.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert by_steps.optimizer.iterations == in_fit.optimizer.iterations == 1
    # A callback that stops within an accumulation: what there is makes an update.
    stop = ar.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: setattr(stopped, "stop_training", True)
    )
    stopped.fit(x, y, 12, shuffle=False, verbose=0, callbacks=[stop])
    assert stopped.optimizer.iterations == 1
    for _ in range(3):
        by_steps.train_on_batch(x, y)
    assert by_steps.optimizer.iterations == 1
    by_steps.finish_update()
    assert by_steps.optimizer.iterations == 2


def test_batches_that_run_out_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        found = [each.getMessage() for each in caplog.records]
        caplog.clear()
        return found

    x, y = blobs(50)
    model = classifier()
    options: dict[str, Any] = {"epochs": 3, "verbose": 0}
    history = model.fit(x, y, validation_data=iter(batches()), **options).history
    assert (len(history["loss"]), len(history["val_loss"])) == (3, 1)
    (line,) = said()
    assert line.startswith("fit: validation_data gave no batch; pass something")
    model.fit(x, y, validation_data=batches(), validation_steps=9, **options)
    (line,) = said()
    assert line.startswith("fit: validation_data ended after 4 batches of validation_steps=9;")
    history = model.fit(iter(batches()), steps_per_epoch=3, **options).history
    assert len(history["loss"]) == 2  # 3 and 1
    first, second = said()
    assert first.startswith("fit: x ended after 1 batches of steps_per_epoch=3;")
    assert second.startswith("fit: x has no more batches for epoch 3 of 3")
    model.evaluate(x, y, 16, steps=9, verbose=0)
    assert said() == ["evaluate: x ended after 4 batches of steps=9"]
    model.fit(x, y, 16, steps_per_epoch=9, validation_data=(x, y), validation_steps=2, **options)
    assert said() == []


class TwoOutputs(nn.Model):
    """Takes a dict or tuple of two arrays, and gives a dict of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(4, "tanh"), nn.Dense(4, "tanh")
        self.price, self.kind = nn.Dense(1), nn.Dense(3, "softmax")

    def call(self, inputs: Any) -> Any:
        left, right = inputs.values() if isinstance(inputs, dict) else inputs
        both = self.first(left) + self.second(right)
        return {"price": self.price(both), "kind": self.kind(both)}


@pytest.mark.parametrize("replicas", [1, 2])
def test_dicts_and_tuples_of_arrays_go_in_and_out(replicas: int) -> None:
    x, y = blobs(50)
    found = []
    for inputs in ({"a": x[:, :2], "b": x[:, 2:]}, (x[:, :2], x[:, 2:])):
        set_seed(0)
        with MirroredStrategy([f"CPU:{index}" for index in range(replicas)]).scope():
            model = TwoOutputs()
            model.compile(
                "sgd",
                {"price": "mse", "kind": LOSS},
                {"kind": ["accuracy"]},
                loss_weights={"price": 0.5},
                weighted_metrics={"price": ["mae"]},
            )
        targets = {"price": x[:, :1], "kind": y}
        weights = np.linspace(0, 1, 50)
        history = model.fit(inputs, targets, 16, 2, sample_weight=weights, verbose=0).history
        assert list(history) == ["loss", "price_loss", "kind_loss", "price_mae", "kind_accuracy"]
        total = 0.5 * history["price_loss"][0] + history["kind_loss"][0]
        assert history["loss"][0] == pytest.approx(total, rel=1e-6)
        outputs = model.predict(inputs, verbose=0)
        assert outputs["kind"].shape == (50, 3)
        found.append(history)
    assert found[0] == found[1]


def test_a_train_step_of_ones_own() -> None:
    x, y = blobs(50)
    seen = []

    class Own(nn.Sequential):
        def train_step(self, data: Any) -> Any:
            seen.append(len(data))
            x, y = data
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
            self.optimizer.minimize(loss, self.trainable_variables)
            return {"loss": loss, "twice": loss * 2, **self.compute_metrics(x, y, y_pred)}

        def test_step(self, data: Any) -> Any:
            return {**super().test_step(data), "extra": ar.ops.ones_like(data[1])}

    histories = []
    for kind in (Own, nn.Sequential):
        set_seed(1)
        model = kind([nn.Dense(8, "tanh"), nn.Dense(3, "softmax")], name="own")
        model.compile(optim.Adam(0.01), LOSS, ["accuracy"])
        histories.append(model.fit(x, y, 16, 3, verbose=0, validation_data=(x, y)).history)
    own, usual = histories
    np.testing.assert_array_equal(own.pop("twice"), 2 * np.array(usual["loss"]))
    assert own.pop("val_extra") == [1.0] * 3
    assert own == usual
    assert set(seen) == {2}

    class Wrong(nn.Sequential):
        def train_step(self, data: Any) -> Any:
            return self(data[0])

    wrong = Wrong([nn.Dense(3)])
    wrong.compile("sgd")
    with pytest.raises(UsageError, match=r"Wrong.train_step returned .*; return a dict"):
        wrong.fit(x, y, verbose=0)


def batches(rows: int = 50, size: int = 16) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = blobs(rows)
    return [(x[at : at + size], y[at : at + size]) for at in range(0, rows, size)]


class Indexed:
    """Batches by their index, as Keras's PyDataset."""

    def __init__(self) -> None:
        self.epochs = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return batches()[index]

    def on_epoch_end(self) -> None:
        self.epochs += 1


@pytest.mark.parametrize("replicas", [1, 3])
def test_iterables_of_batches_train_as_arrays_do(replicas: int) -> None:
    x, y = blobs(50)
    tests: dict[str, Any] = {"validation_data": (x, y), "validation_batch_size": 16, "verbose": 0}
    expected = on_replicas(replicas).fit(x, y, 16, 2, shuffle=False, **tests).history
    indexed = Indexed()

    cases: tuple[tuple[Any, dict[str, Any]], ...] = (
        (batches(), {}),
        (indexed, {}),
        (endless(), {"steps_per_epoch": 4}),
        ((batch for _ in range(2) for batch in batches()), {"steps_per_epoch": 4}),
    )
    for given, more in cases:
        model = on_replicas(replicas)
        found = model.fit(given, epochs=2, **more, **tests).history
        assert found == expected
    assert indexed.epochs == 2
    assert model.evaluate(iter(batches()), verbose=0) == model.evaluate(x, y, 16, verbose=0)
    outputs = model.predict(iter(batches()), verbose=0)
    np.testing.assert_array_equal(outputs, model.predict(x, 16, verbose=0))
    weighted = [(x, y, np.full(len(x), 2.0)) for x, y in batches()]
    doubled = model.evaluate(weighted, verbose=0)[0]
    assert doubled == pytest.approx(2 * model.evaluate(x, y, verbose=0)[0])


class Loader:
    """Gives lists of tensors of another library, anew for each pass, as a DataLoader does."""

    class Tensor:
        def __init__(self, values: np.ndarray) -> None:
            self.values, self.shape = values, values.shape

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.values

    def __len__(self) -> int:
        return len(batches())

    def __iter__(self) -> Iterator[Any]:
        return iter([[self.Tensor(x), self.Tensor(y)] for x, y in batches()])


def test_a_loader_of_another_librarys_tensors_is_gone_through() -> None:
    x, y = blobs(50)
    expected = classifier().fit(x, y, 16, 2, shuffle=False, verbose=0).history
    assert classifier().fit(Loader(), epochs=2, verbose=0).history == expected


def test_a_torch_loader_is_gone_through() -> None:
    torch = pytest.importorskip("torch")
    x, y = blobs(50)
    data = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    expected = classifier().fit(x, y, 16, 2, shuffle=False, verbose=0).history
    assert classifier().fit(loader, epochs=2, verbose=0).history == expected


def test_a_torch_loader_without_a_length_is_gone_through() -> None:
    torch: Any = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            yield from zip(*blobs(50), strict=True)

    x, y = blobs(50)
    loader = torch.utils.data.DataLoader(Stream(), batch_size=16)
    expected = classifier().fit(x, y, 16, 2, shuffle=False, verbose=0).history
    assert classifier().fit(loader, epochs=2, verbose=0).history == expected


class WithoutLength(Loader):
    """Has `__len__`, which raises, as a DataLoader's over an iterable dataset does."""

    def __len__(self) -> int:
        raise TypeError("object of type 'Stream' has no len()")


def test_a_length_that_cannot_be_told_is_unknown() -> None:
    x, y = blobs(50)
    expected = classifier().fit(x, y, 16, 2, shuffle=False, verbose=0).history
    assert classifier().fit(WithoutLength(), epochs=2, verbose=0).history == expected


def endless(rows: int = 50) -> Iterator[Any]:
    while True:
        yield from batches(rows)


@pytest.mark.parametrize("replicas", [1, 2])
def test_generators_of_the_caller_stay_open(replicas: int) -> None:
    model = on_replicas(replicas)
    train, tests = endless(48), endless(48)
    options: dict[str, Any] = {"steps_per_epoch": 2, "validation_steps": 2, "verbose": 0}
    for _ in range(2):
        history = model.fit(train, epochs=2, validation_data=tests, **options).history
        assert len(history["val_loss"]) == 2
    for _ in range(2):
        model.evaluate(tests, steps=2, verbose=0)
        assert len(model.predict(tests, steps=2, verbose=0)) == 32
    np.testing.assert_array_equal(next(train)[0], batches(48)[8 % 3][0])
    np.testing.assert_array_equal(next(tests)[0], batches(48)[16 % 3][0])


def test_each_validation_of_some_steps_has_the_same_rows() -> None:
    x, y = blobs(50)
    for tests in ((x, y), batches()):
        model = classifier()
        model.compile(optim.SGD(0.0), LOSS)  # the weights stay
        size: dict[str, Any] = {} if isinstance(tests, list) else {"validation_batch_size": 16}
        losses = model.fit(
            *(x, y, 16, 4), validation_data=tests, validation_steps=2, verbose=0, **size
        ).history["val_loss"]
        assert losses == [losses[0]] * 4
        assert losses[0] == pytest.approx(model.evaluate(x[:32], y[:32], verbose=0), rel=1e-6)


def test_a_generator_that_ends_ends_training() -> None:
    model = classifier()
    history = model.fit((batch for batch in batches()), epochs=3, verbose=0)
    assert history.epoch == [0]
    gone = iter(batches())
    list(gone)
    with pytest.raises(UsageError, match="x gave no batch"):
        model.fit(gone, verbose=0)


def _raising() -> Iterator[Any]:
    yield batches()[0]
    raise RuntimeError("the disk is gone")


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda m: m.fit([batches()[0], (np.ones((4, 5), "f"), np.zeros(4, int))], verbose=0),
            ShapeError,
            r"batch 1 has x float32 \(rows, 5\), .* but batch 0 had x float32",
        ),
        (
            lambda m: m.fit([batches()[0], (np.ones((4, 6)), np.zeros(4, int))], verbose=0),
            ShapeError,
            r"batch 1 has x float64 .*, but batch 0 had x float32 .*; give batches of the same",
        ),
        (
            lambda m: m.fit([batches()[0], (np.ones((4, 6), "f"), np.full(4, 5))], verbose=0),
            UsageError,
            "label 5 in row 0 of batch 1: y is no class",
        ),
        (
            lambda m: m.fit([(np.ones((4, 6)), np.zeros(3))], verbose=0),
            ShapeError,
            r"batch 0: x and y need .* 4 and 3: .* \(4, 6\) and \(3,\)",
        ),
        (lambda m: m.fit([(1, 2, 3, 4)], verbose=0), UsageError, "batch 0 is a tuple of 4"),
        (lambda m: m.fit(_raising(), verbose=0), RuntimeError, "the disk is gone"),
        (
            lambda m: m.fit(iter(batches()), validation_split=0.2),
            UsageError,
            "validation_split takes rows of arrays away; with batches of list_iterator pass",
        ),
        (lambda m: m.fit(iter(batches()), batch_size=3), UsageError, "batch_size is not taken"),
        (lambda m: m.fit(iter(batches()), blobs(3)[1]), UsageError, "y is not taken"),
        (
            lambda m: m.fit(*blobs(8), sample_weight=np.ones(7)),
            ShapeError,
            "x and sample_weight need one row per sample each, but have 8 and 7",
        ),
        (
            lambda m: m.fit(*blobs(8), class_weight={0: 1}, sample_weight=np.ones(8)),
            UsageError,
            "class_weight or sample_weight, not both",
        ),
        (lambda m: m.fit(*blobs(8), class_weight=[1, 2]), UsageError, "class_weight is a dict"),
        (
            lambda m: m.fit(*blobs(8), validation_split=0.99),
            UsageError,
            "leaves 0 to train on and 8 to validate; both need some",
        ),
        (lambda m: m.fit(*blobs(8), validation_split=1.5), UsageError, "from 0 to below 1"),
        (
            lambda m: untyped.Dense(3, kernel_regularizer="l2"),
            UsageError,
            "Dense takes no kernel_regularizer=: add the penalty to the loss in a train_step",
        ),
        (lambda m: untyped.Dense(3, activations="relu"), UsageError, "did you mean 'activation'"),
        (lambda m: m.fit(*blobs(8), workers=2), UsageError, "fit takes no workers=: batches are"),
        (lambda m: m.fit(*blobs(8), epoch=2), UsageError, "did you mean 'epochs'"),
        (
            lambda m: m.compile("sgd", "mse", jit_compile=True),
            UsageError,
            "compile takes no jit_compile=: steps are always traced",
        ),
        (lambda m: m.fit(blobs(8)[0]), UsageError, "y is missing: the loss and the metrics"),
        (lambda m: m.fit(), UsageError, "x is missing"),
    ],
)
def test_bad_input_is_refused(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(classifier())
