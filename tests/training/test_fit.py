"""The fit loop on one process: exact means, histories, what people see, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

from allreduce import nn, optim
from allreduce.errors import NumericsError, ShapeError, UsageError
from allreduce.graph import ops, set_seed
from allreduce.training.progress import describe_batch
from tests.nn.common import blobs, classifier


def on_replicas(count: int, **settings: Any) -> nn.Sequential:
    """Make `classifier` for a number of logical CPUs."""
    with MirroredStrategy([f"CPU:{index}" for index in range(count)]).scope():
        return classifier(**settings)


@pytest.mark.parametrize(("rows", "batch_size"), [(90, 32), (90, 7), (9, 8), (2, 64)])
def test_replicas_agree_however_rows_divide(rows: int, batch_size: int) -> None:
    x, y = blobs(rows)
    runs = []
    for count in (1, 2, 4):
        model = on_replicas(count, dropout=0.2)
        history = model.fit(
            x, y, batch_size=batch_size, epochs=3, validation_data=(x, y), verbose=0
        ).history
        runs.append((history, model.predict(x, batch_size=batch_size, verbose=0)))
        assert history["val_loss"][-1] == model.evaluate(x, y, batch_size=batch_size, verbose=0)[0]
    for history, outputs in runs[1:]:
        assert history.keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
        for name, values in history.items():
            np.testing.assert_allclose(values, runs[0][0][name], rtol=1e-6)
        np.testing.assert_allclose(outputs, runs[0][1], rtol=1e-5, atol=1e-6)


def test_fit_learns_and_returns_floats_by_epoch() -> None:
    x, y = blobs()
    history = classifier().fit(x, y, batch_size=30, epochs=25, verbose=0)
    assert history.epoch == list(range(25))
    assert all(type(value) is float for value in history.history["loss"])
    assert history.history["loss"][-1] < 0.3 * history.history["loss"][0]
    assert history.history["accuracy"][-1] > 0.95


def test_epochs_are_shuffled_anew_and_repeatably() -> None:
    seen: list[list[float]] = []
    x = np.arange(8, dtype=np.float32)[:, None]

    def order(shuffle: bool) -> list[list[float]]:
        seen.clear()
        set_seed(3)
        model = nn.Sequential([nn.Dense(1)])
        model.compile("sgd", "mse")
        step = model.replicator.run

        def spy(fn: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(args[0].values[0][:, 0].tolist())
            return step(fn, args, kwargs)

        model.replicator.run = spy  # type: ignore[method-assign]
        try:
            model.fit(x, x, batch_size=8, epochs=2, shuffle=shuffle, verbose=0)
        finally:
            del model.replicator.run
        return list(seen)

    first, second = order(True)
    assert sorted(first) == sorted(second) == x[:, 0].tolist()
    assert first != second
    assert order(True) == [first, second]
    assert order(False) == [x[:, 0].tolist()] * 2


def test_a_scalar_loss_counts_as_the_mean_over_its_rows() -> None:
    x, y = blobs(10)

    def scalar(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(nn.losses.sparse_categorical_crossentropy(y_true, y_pred))

    histories = []
    for loss in (scalar, "sparse_categorical_crossentropy"):
        with MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
            model = classifier()
            model.compile(optim.SGD(0.1), loss)
        histories.append(model.fit(x, y, batch_size=7, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-6)


def test_losses_with_more_axes_are_averaged_per_sample() -> None:
    x = np.random.default_rng(0).normal(size=(6, 5, 3)).astype(np.float32)
    model = nn.Sequential([nn.Dense(2)])
    model.compile("sgd", "mse")
    loss = model.evaluate(x, np.zeros((6, 5, 2)), verbose=0)
    np.testing.assert_allclose(loss, (model.predict(x, verbose=0) ** 2).mean(), rtol=1e-6)


def test_evaluate_returns_a_list_a_number_or_a_dict() -> None:
    x, y = blobs()
    model = classifier()
    loss, accuracy = model.evaluate(x, y, verbose=0)
    assert model.evaluate(x, y, verbose=0, return_dict=True) == {
        "loss": loss,
        "accuracy": accuracy,
    }
    model.compile("adam", "sparse_categorical_crossentropy")
    assert model.evaluate(x, y, verbose=0) == loss


def test_plain_lines_when_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = blobs(40)
    on_replicas(3).fit(x, y, batch_size=16, epochs=2, validation_data=(x, y))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "global batch 16 = 1 × 6 + 2 × 5"
    assert len(lines) == 3
    for number, line in enumerate(lines[1:], 1):
        assert line.startswith(f"epoch {number}/2  loss ")
        for part in ("accuracy ", "val_loss ", "val_accuracy ", " samples/s"):
            assert part in line
    classifier().fit(x, y, verbose=0)
    assert capsys.readouterr().out == ""


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    x, y = blobs(40)
    classifier().fit(x, y, batch_size=16, epochs=1)
    printed = capsys.readouterr().out
    assert "━" in printed
    assert "3/3" in printed
    assert "loss" in printed


def test_batches_are_described() -> None:
    assert describe_batch(256, 8) == "global batch 256 = 8 × 32"
    assert describe_batch(5, 8) == "global batch 5 = 5 × 1 + 3 × 0"


def test_the_default_batch_is_32_per_replica(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = blobs(40)
    on_replicas(2).fit(x, y)
    assert "global batch 64 = 2 × 32" in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 2])
def test_a_nan_loss_names_epoch_and_step(count: int) -> None:
    x, y = blobs(60)
    x[45] = np.nan
    model = on_replicas(count)
    with pytest.raises(NumericsError, match=r"epoch 1, step 3 .*learning rate"):
        model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)


def fitted(x: Any = None, y: Any = None, **options: Any) -> Any:
    own_x, own_y = blobs(12)
    x = own_x if x is None else x
    return classifier().fit(x, own_y if y is None else y, verbose=0, **options)


def _labels(row: int, label: float) -> np.ndarray:
    labels = np.zeros(12, np.array(label).dtype)
    labels[row] = label
    return labels


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: fitted(y=np.zeros(5, int)), ShapeError, r"\(12, 6\) and \(5,\): 12 rows and 5"),
        (lambda: fitted(x=np.empty((0, 6))), UsageError, r"x is empty: its shape is \(0, 6\)"),
        (lambda: fitted(x=[[1.0], [1.0, 2.0]]), UsageError, "x cannot be made into one array"),
        (lambda: fitted(x=np.array([None, {}])), UsageError, "x has dtype object"),
        (lambda: fitted(x=np.array(["a", "b"])), UsageError, "x has dtype <U1"),
        (lambda: fitted(x=3.0), ShapeError, "x is the scalar 3.0"),
        (lambda: fitted(y=np.full(12, 3)), UsageError, "label 3 in row 0"),
        (lambda: fitted(y=np.full(12, -1)), UsageError, "label -1"),
        (
            lambda: fitted(y=_labels(7, 3)),
            UsageError,
            "label 3 in row 7 of y is no class: .* 3 out",
        ),
        (lambda: fitted(y=_labels(9, 0.7)), UsageError, "label 0.7 in row 9 of y is no class"),
        (lambda: fitted(y=_labels(2, np.nan)), UsageError, "label nan in row 2 of y"),
        (
            lambda: fitted(validation_data=(np.ones((12, 6)), _labels(5, 4)[:, None])),
            UsageError,
            "label 4 in row 5 of validation y",
        ),
        (lambda: classifier().evaluate(blobs(12)[0], _labels(7, 3)), UsageError, "row 7 of y"),
        (lambda: fitted(shuffle="no"), UsageError, "shuffle is True or False, not 'no'"),
        (lambda: classifier().fit(*blobs(), verbose=np.ones(3)), UsageError, "verbose is"),
        (
            lambda: fitted(y=np.zeros((12, 3))),
            ShapeError,
            r"\(x has shape \(12, 6\) and y \(12, 3\)\)",
        ),
        (lambda: fitted(batch_size=0), UsageError, "batch_size is the global batch"),
        (lambda: fitted(epochs=-1), UsageError, "epochs is an integer from 0"),
        (lambda: fitted(epochs=1.5), UsageError, "epochs is an integer from 0"),
        (lambda: fitted(data="shards"), UsageError, 'data is "same"'),
        (lambda: classifier().fit(*blobs(), verbose=3), UsageError, "verbose is"),
        (lambda: fitted(validation_data=np.ones(3)), UsageError, r"a pair \(x, y\)"),
        (
            lambda: fitted(validation_data=(np.ones((3, 6)), np.zeros(2, int))),
            ShapeError,
            "validation x and validation y",
        ),
        (
            lambda: fitted(validation_data=(np.ones((3, 4)), np.zeros(3, int))),
            ShapeError,
            r"takes inputs of shape \(…, 6\), but got \(batch, 4\) \(validation x has shape",
        ),
        (lambda: classifier().predict(np.empty((0, 6))), UsageError, "x is empty"),
    ],
)
def test_bad_input_is_refused(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_features_have_to_fit_a_built_model() -> None:
    model = classifier()
    model.build((None, 6))
    with pytest.raises(ShapeError, match=r"\(…, 6\), but got \(batch, 5\) \(x has shape \(8, 5\)"):
        model.fit(np.ones((8, 5)), np.zeros(8, int))


def test_mse_never_broadcasts_targets() -> None:
    model = nn.Sequential([nn.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ShapeError, match=r"\(batch,\) and y_pred \(batch, 1\).*y\[:, None\]"):
        model.fit(np.ones((8, 5)), np.ones(8))


def test_a_model_made_outside_its_strategy_is_refused() -> None:
    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inside = nn.Sequential()
    inside.compile("sgd", "mse")
    outside = nn.Dense(1)
    inside.add(outside)
    with pytest.raises(UsageError, match=r"outside of any strategy's scope.*in the scope of"):
        inside.fit(np.ones((8, 5)), np.ones((8, 1)))


def test_whole_labels_may_be_floats() -> None:
    x, y = blobs()
    histories = [classifier().fit(x, labels, verbose=0).history for labels in (y, y.astype(float))]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("count", [1, 3])
def test_evaluating_between_epochs_changes_nothing(count: int) -> None:
    x, y = blobs()
    model = on_replicas(count, dropout=0.5)
    expected = model.fit(x, y, batch_size=20, epochs=2, verbose=0).history["loss"]
    for replicas in (1, 3):
        again = on_replicas(replicas, dropout=0.5)
        losses = []
        for _ in range(2):
            losses += again.fit(x, y, batch_size=20, verbose=0).history["loss"]
            again.evaluate(x, y, verbose=0)  # with a batch, and a number of them, of its own
            again.predict(x, verbose=0)
        np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_loss_object_as_metric_has_its_own_name() -> None:
    x, y = blobs()
    model = classifier()
    metric = nn.losses.SparseCategoricalCrossentropy(name="surprise")
    model.compile("sgd", "sparse_categorical_crossentropy", [metric])
    measured = model.evaluate(x, y, verbose=0, return_dict=True)
    assert measured["surprise"] == measured["loss"]
