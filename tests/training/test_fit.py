"""The fit loop on one process: exact means, histories, what people see, what is refused."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

from allreduce import nn, optim
from allreduce.errors import NumericsError
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

        def spy(fn: Any, args: Any = (), kwargs: Any = None, *, eagerly: bool = False) -> Any:
            seen.append(args[0].values[0][:, 0].tolist())
            return step(fn, args, kwargs, eagerly=eagerly)

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
    assert re.search(r"-?-:--|0:0\d", printed)  # the time left


@pytest.mark.parametrize("validated", [False, True])
def test_an_epoch_fits_on_a_line_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, validated: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    x, y = blobs(40)
    classifier().fit(x, y, batch_size=4, validation_data=(x, y) if validated else None)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[?\d;]*\w", "", capsys.readouterr().out))
    shown = [line for line in lines if line.strip() and "global batch" not in line]
    assert shown
    assert all(line.startswith("epoch 1/1") for line in shown), shown
    assert all(len(line.rstrip()) <= 80 for line in shown), shown
    assert ("val_accuracy " in shown[-1]) == validated


def test_time_spent_waiting_for_input_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = blobs(40)

    def slow() -> Any:
        for at in (0, 20):
            time.sleep(0.4)  # much longer than a step, also on a busy machine
            yield x[at : at + 20], y[at : at + 20]

    model = on_replicas(2)
    model.fit(x, y, 20, verbose=0)  # so that no step compiles
    model.fit(slow(), verbose=2)
    (line,) = capsys.readouterr().out.splitlines()
    share = re.search(r"(\d+)% waiting for input", line)
    assert share is not None, line
    assert int(share[1]) > 30
    assert "samples/s" in line


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
    with pytest.raises(NumericsError, match=r"epoch 1, step 1 .*and in the weights: a NaN loss in"):
        model.fit(np.zeros_like(x), y, verbose=0)


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
