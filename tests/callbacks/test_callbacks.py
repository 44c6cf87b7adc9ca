"""Each callback of `ar.callbacks` in `fit`, in one process."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import allreduce as ar
from allreduce.errors import PeerLostError, UsageError
from allreduce.training import hooks
from tests.nn.common import blobs, classifier

untyped: Any = ar.callbacks


def fitted(*callbacks: Any, epochs: int = 3, model: Any = None, **options: Any) -> Any:
    """Fit `classifier` with callbacks; returns the model and its History."""
    x, y = blobs(60)
    model = model or classifier()
    options = {"batch_size": 20, "validation_data": (x[:20], y[:20]), "verbose": 0, **options}
    return model, model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **options)


class Scripted(ar.callbacks.Callback):
    """Puts given values into the logs, as if the model had them."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["val_loss"] = self.values[epoch]


def test_an_error_keeps_what_it_came_of_where_another_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(*_: object) -> None:
        raise PeerLostError("rank 1 died")

    class Fails(ar.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            try:
                logs["missing"]
            except KeyError:
                raise ValueError("no such log")  # noqa: B904

    monkeypatch.setattr(hooks, "size_of", lambda _: 2)
    monkeypatch.setattr(hooks, "gather_integers", lose)
    model = SimpleNamespace(replicator=None, stop_training=False)
    with pytest.raises(ValueError, match="no such log") as caught:
        hooks.Hooks(model, [Fails()], {}).call("on_train_begin")
    assert isinstance(caught.value.__context__, KeyError)
    assert not caught.value.__suppress_context__
    assert caught.value.__notes__ == ["the other ranks could not be told: rank 1 died"]


def test_methods_are_called_in_keras_order_with_the_logs() -> None:
    called: list[str] = []
    logs_of: dict[str, Any] = {}

    class Spy(ar.callbacks.Callback):
        pass

    for name in ar.callbacks.base.HOOKS:

        def hook(self: Any, *given: Any, name: str = name) -> None:
            *numbers, logs = given
            called.append(" ".join([name.removeprefix("on_"), *map(str, numbers)]))
            logs_of[name] = dict(logs)

        setattr(Spy, name, hook)
    spy = Spy()
    model, history = fitted(spy, epochs=1, batch_size=30)
    steps = [f"train_batch_{when} {i}" for i in (0, 1) for when in ("begin", "end")]
    tests = ["test_begin", "test_batch_begin 0", "test_batch_end 0", "test_end"]
    ends = ["epoch_end 0", "train_end"]
    assert called == ["train_begin", "epoch_begin 0", *steps, *tests, *ends]
    assert logs_of["on_train_batch_end"]["loss"] == history.history["loss"][0]
    assert logs_of["on_epoch_end"] == {k: v[0] for k, v in history.history.items()}
    assert spy.params == {"epochs": 1, "steps": 2, "verbose": 0, "do_validation": True}
    assert spy.model is model
    called.clear()
    model.predict(blobs(60)[0], batch_size=60, verbose=0, callbacks=[spy])
    batch = ["predict_batch_begin 0", "predict_batch_end 0"]
    assert called == ["predict_begin", *batch, "predict_end"]


def test_logs_of_batches_are_means_so_far_over_all_replicas() -> None:
    seen = []
    log = ar.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs["loss"]))
    losses = []
    for count in (1, 3):
        seen.clear()
        with MirroredStrategy([f"CPU:{i}" for i in range(count)]).scope():
            model = classifier()
        fitted(log, epochs=1, model=model)
        losses.append(list(seen))
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_early_stopping_stops_and_gives_the_best_weights_back() -> None:
    weights: list[Any] = []
    keep = ar.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: weights.append(model.get_weights()[0])
    )
    model = classifier()
    values = [3.0, 1.0, 2.0, 1.5, 0.5]
    stop = ar.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    _, history = fitted(Scripted(values), keep, stop, epochs=5, model=model)
    assert history.history["val_loss"] == values[:4]
    assert (stop.stopped_epoch, stop.best_epoch, stop.best) == (3, 1, 1.0)
    np.testing.assert_array_equal(model.get_weights()[0], weights[1])
    assert not np.array_equal(weights[1], weights[3])


def test_early_stopping_watches_rising_values_a_baseline_and_a_start() -> None:
    for stop, epochs in (
        (ar.callbacks.EarlyStopping(mode="max"), 3),
        (ar.callbacks.EarlyStopping(baseline=0.5, patience=2), 2),
        (ar.callbacks.EarlyStopping(mode="max", start_from_epoch=2), 4),
        (ar.callbacks.EarlyStopping(mode="max", min_delta=3.0, patience=3), 4),
    ):
        _, history = fitted(Scripted([1.0, 2.0, 2.0, 2.0, 9.0]), stop, epochs=5)
        assert len(history.epoch) == epochs


class Share(ar.nn.metrics.Metric):
    """A metric with a state and no direction."""

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return ar.ops.stack([ar.ops.sum(ar.ops.ones_like(y_pred)) for _ in range(2)])


class Rising(Share):
    direction = "max"


def pairs(metrics: Any) -> Any:
    """Make a compiled model of one column."""
    model = ar.nn.Sequential([ar.nn.Dense(1, activation="sigmoid")])
    model.compile("sgd", "mse", metrics, weighted_metrics=["mse"])
    return model


@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"])
@pytest.mark.parametrize(
    ("metric", "name", "expected"),
    [
        (ar.nn.metrics.F1Score(name="f1"), "f1", "max"),
        (ar.nn.metrics.AUC(name="pr", curve="PR"), "pr", "max"),
        (Rising(name="good"), "val_good", "max"),
        ("mae", "mae", "min"),
        ("mse", "weighted_mse", "min"),
        ("cosine_similarity", "cosine_similarity", "max"),
        (ar.nn.losses.CosineSimilarity(name="minus"), "minus", "min"),
        (ar.nn.metrics.Metric(ar.nn.losses.mse, "auc"), "auc", "min"),  # not what its name says
        (Share(name="odd_accuracy"), "odd_accuracy", None),
        (lambda y_true, y_pred: y_pred, "<lambda>", None),
        ("mae", "loss", "min"),
        ("mae", "val_loss", "min"),
    ],
)
def test_modes_follow_the_metrics_direction(
    kind: str, metric: Any, name: str, expected: str | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"monitor": name}
    if kind == "ModelCheckpoint":
        options |= {"filepath": tmp_path / "best", "save_best_only": True}
    callback = getattr(ar.callbacks, kind)(**options)
    x = blobs(20)[0]
    y = (x[:, :1] > 0).astype("f")

    def fit() -> None:
        pairs([metric]).fit(x, y, verbose=0, validation_data=(x, y), callbacks=[callback])

    if expected is None:
        said = f"{kind} cannot tell whether '{name}' should rise or fall: pass mode="
        with pytest.raises(UsageError, match=said):
            fit()
        return
    fit()
    monitor = callback._monitor
    assert monitor.best is not None
    assert monitor.improves(monitor.best + 1, monitor.best) is (expected == "max")


def test_a_metric_of_cosines_is_the_cosine(tmp_path: Path) -> None:
    x = blobs(20)[0]
    model = ar.nn.Sequential([ar.nn.Input((6,)), ar.nn.Dense(6)])
    model.compile("sgd", "cosine_similarity", ["cosine_similarity"])
    found = model.evaluate(x, x, verbose=0)
    assert found[1] == pytest.approx(-found[0])
    outputs = model.predict(x, verbose=0)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(outputs, axis=1)
    assert found[1] == pytest.approx(((x * outputs).sum(axis=1) / norms).mean(), rel=1e-5)
    metric = ar.nn.metrics.CosineSimilarity()
    metric.update_state(x, outputs)
    assert metric.result() == pytest.approx(found[1], rel=1e-5)
    # The loss of that name, passed as a metric, stays what it is, in a loaded model too.
    model.compile("sgd", "mse", [ar.nn.losses.cosine_similarity])
    model.save(tmp_path / "model")
    loaded = ar.nn.load_model(tmp_path / "model")
    assert loaded.evaluate(x, x, verbose=0)[1] == pytest.approx(found[0])


def test_short_names_of_batches_are_called() -> None:
    called: list[str] = []

    class Short(ar.callbacks.Callback):
        def on_batch_begin(self, batch: int, logs: Any = None) -> None:
            called.append(f"begin {batch}")

        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            called.append(f"end {batch} {sorted(logs)}")

    one = ar.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: called.append("lambda"))
    fitted(Short(), one, epochs=1, batch_size=30)
    names = ["accuracy", "loss"]
    assert called == ["begin 0", f"end 0 {names}", "lambda", "begin 1", f"end 1 {names}", "lambda"]


class Misspelt(ar.callbacks.Callback):
    def on_epochs_end(self, epoch: int, logs: Any = None) -> None:
        raise AssertionError("it is refused before")


def test_plateaus_lower_the_learning_rate() -> None:
    plateau = ar.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, cooldown=2, min_lr=0.002)
    model, history = fitted(Scripted([1.0] * 7), plateau, epochs=7)
    assert history.history["learning_rate"] == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025, 0.002]
    assert model.optimizer.learning_rate == 0.002
    model.compile(ar.optim.SGD(ar.optim.schedules.ExponentialDecay(0.1, 10, 0.9)), "mse")
    scheduled = classifier()
    schedule = ar.optim.schedules.ExponentialDecay(0.1, 10, 0.9)
    scheduled.compile(ar.optim.SGD(schedule), "sparse_categorical_crossentropy")
    with pytest.raises(UsageError, match="learning rate is a schedule; give it a number"):
        fitted(ar.callbacks.ReduceLROnPlateau(patience=10), epochs=1, model=scheduled)


def test_schedulers_get_the_epoch_and_the_rate() -> None:
    for schedule, rates in (
        (lambda epoch, rate: rate / 2 if epoch else rate, [0.01, 0.005, 0.0025]),
        (lambda epoch: 0.1 * (epoch + 1), [0.1, 0.2, 0.30000000000000004]),
        (lambda epoch: np.array(0.5**epoch), [1.0, 0.5, 0.25]),
    ):
        _, history = fitted(ar.callbacks.LearningRateScheduler(schedule))
        assert history.history["learning_rate"] == rates


def test_checkpoints_save_the_best_under_names_of_epochs(tmp_path: Path) -> None:
    path = tmp_path / "{epoch:02d}-{val_loss:.1f}.safetensors"
    best = ar.callbacks.ModelCheckpoint(path, save_best_only=True)
    model, _ = fitted(Scripted([2.0, 3.0, 1.0]), best)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "01-2.0.safetensors",
        "03-1.0.safetensors",
    ]
    loaded = ar.nn.load_model(tmp_path / "03-1.0.safetensors")
    assert loaded.epochs_done == 3
    x, y = blobs(60)
    again = [each.fit(x, y, verbose=0).history["loss"] for each in (model, loaded)]
    assert again[0] == again[1]


def test_checkpoints_count_batches_and_save_weights(tmp_path: Path) -> None:
    every = ar.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}-{batch}", save_freq=4, save_weights_only=True
    )
    model, _ = fitted(every)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["2-1", "3-2"]
    model.load_weights(tmp_path / "3-2")
    with pytest.raises(UsageError, match="names 'val_auc', but there are loss"):
        fitted(ar.callbacks.ModelCheckpoint(tmp_path / "{val_auc}"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{epochs}", r"names 'epochs', but there are epoch, loss.*did you mean 'epoch'\?"),
        ("{val_los:.2f}", r"did you mean 'val_loss'\?"),
        ("{batch}", "names 'batch', but there are epoch"),
        ("{}", "names '', but there are epoch"),
        ("{epoch", "expected '}'"),
        ("{epoch:.2s}", "filepath .*: Unknown format code 's'|Precision not allowed in integer"),
        ("{loss:d}", "filepath .*: Unknown format code 'd'"),
    ],
)
def test_a_misspelt_name_of_a_checkpoint_fails_before_the_first_epoch(
    tmp_path: Path, name: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        fitted(ar.callbacks.ModelCheckpoint(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_its_folder_fails_before_the_first_epoch(tmp_path: Path) -> None:
    checkpoint = ar.callbacks.ModelCheckpoint(tmp_path / "none" / "model.safetensors")
    seen: list[int] = []
    watch = ar.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: seen.append(epoch))
    with pytest.raises(UsageError, match=r"there is no folder .*none; make it first"):
        fitted(watch, checkpoint)
    assert not seen


def test_csv_files_have_a_line_per_epoch(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    _, first = fitted(ar.callbacks.CSVLogger(path), epochs=2)
    _, more = fitted(ar.callbacks.CSVLogger(path, append=True), epochs=2, validation_freq=2)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1", "0", "1"]
    losses = [float(row["loss"]) for row in rows]
    assert losses == first.history["loss"] + more.history["loss"]
    assert [row["val_loss"] for row in rows][2] == "NA"


def test_a_csv_file_that_cannot_be_opened_is_named_with_a_remedy(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no" / "log.csv", "No such file"), (tmp_path, "Is a dir")):
        said = f"^CSVLogger cannot write {path}: {reason}.*; name a file elsewhere$"
        with pytest.raises(UsageError, match=said):
            fitted(ar.callbacks.CSVLogger(path))


def test_csv_files_keep_a_validation_that_comes_later(tmp_path: Path) -> None:
    _, history = fitted(ar.callbacks.CSVLogger(tmp_path / "log.csv"), epochs=2, validation_freq=2)
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["val_loss"] for row in rows] == ["NA", str(history.history["val_loss"][0])]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_nan_ends_training_with_the_weights_of_before(replicas: int) -> None:
    x, y = blobs(60)
    with MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).scope():
        model, short = classifier(), classifier()
    short.fit(x[:40], y[:40], batch_size=20, shuffle=False, verbose=0)
    x[47] = np.nan  # of the third batch
    history = model.fit(
        *(x, y, 20, 3),
        shuffle=False,
        verbose=0,
        callbacks=[ar.callbacks.TerminateOnNaN()],
    )
    assert len(history.epoch) == 1
    assert np.isnan(history.history["loss"][0])
    for kept, expected in zip(model.get_weights(), short.get_weights(), strict=True):
        np.testing.assert_allclose(kept, expected, rtol=1e-6)


def test_a_folder_that_tensorboard_cannot_use_fails_before_the_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "logs"):
        said = f"^TensorBoard cannot write into the folder {folder}: .*; pass another log_dir$"
        with pytest.raises(UsageError, match=said):
            fitted(ar.callbacks.TensorBoard(folder))
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        with pytest.raises(UsageError, match="Permission denied; pass another"):
            fitted(ar.callbacks.TensorBoard(tmp_path))


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    board = ar.callbacks.TensorBoard(tmp_path, histogram_freq=2, update_freq=2)
    model, history = fitted(board)

    def read(run: str) -> Any:
        found = EventAccumulator(str(tmp_path / run), {"histograms": 0})
        found.Reload()
        return found

    def values(found: Any, tag: str) -> list[float]:
        return [each.value for each in found.Scalars(tag)]

    train, validation = read("train"), read("validation")
    np.testing.assert_allclose(values(train, "epoch_loss"), history.history["loss"], rtol=1e-6)
    np.testing.assert_allclose(
        values(validation, "epoch_loss"), history.history["val_loss"], rtol=1e-6
    )
    assert values(train, "epoch_learning_rate") == pytest.approx([0.01] * 3)
    assert [each.step for each in train.Scalars("batch_loss")] == [0, 2, 4, 6, 8]
    names = list(model.named_variables())
    assert sorted(train.Tags()["histograms"]) == sorted(names)
    assert [each.step for each in train.Histograms(names[0])] == [0, 2]
    last = train.Histograms(names[0])[-1].histogram_value
    assert last.num == model.get_weights()[0].size
    assert sum(last.bucket) == last.num
    nodes = [node.name for node in train.Graph().node]
    assert any("sequential" in name and "matmul" in name for name in nodes)


def test_the_model_keeps_the_history_of_its_latest_fit() -> None:
    assert classifier().history is None
    seen: list[Any] = []
    model: Any = classifier()
    spy = ar.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.append(model.history.epoch[:]))
    _, history = fitted(spy, model=model)
    assert model.history is history
    assert seen == [[], [0], [0, 1]]


def test_history_draws_its_values() -> None:
    pytest.importorskip("matplotlib")
    _, history = fitted(epochs=4, validation_freq=2)
    figure = history.plot()
    assert [panel.get_title() for panel in figure.axes] == ["loss", "accuracy"]
    loss, val_loss = figure.axes[0].get_lines()
    np.testing.assert_array_equal(loss.get_ydata(), history.history["loss"])
    np.testing.assert_array_equal(val_loss.get_xdata(), [1, 3])
    _, history = fitted(epochs=5, validation_freq=[1, 5])
    val_loss = history.plot(["loss"]).axes[0].get_lines()[1]
    np.testing.assert_array_equal(val_loss.get_xdata(), [0, 4])
    assert len(history.plot(["loss"]).axes) == len(history.plot("loss").axes) == 1
    with pytest.raises(UsageError, match=r"History\.plot: unknown value 'los': .*mean 'loss'"):
        history.plot(["los"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fitted(ar.callbacks.EarlyStopping), "make one: EarlyStopping"),
        (
            lambda: fitted(Misspelt()),
            "Misspelt.on_epochs_end is never called: .*; did you mean 'on_epoch_end'",
        ),
        (lambda: fitted("csv"), "callbacks takes ar.callbacks.Callback objects, not 'csv'"),
        (lambda: ar.callbacks.EarlyStopping(mode="best"), '"auto", "min" or "max", not \'best\''),
        (
            lambda: fitted(untyped.LearningRateScheduler(lambda epoch: None)),
            "LearningRateScheduler's function gave for epoch 1 is a finite number >= 0, not None",
        ),
        (
            lambda: ar.callbacks.ReduceLROnPlateau(factor=2),
            "factor of ReduceLROnPlateau is a finite number > 0 and < 1, not 2",
        ),
        (lambda: ar.callbacks.ReduceLROnPlateau(min_lr=-1), "min_lr of .* number >= 0, not -1"),
        (lambda: ar.callbacks.ReduceLROnPlateau(cooldown=-1), "cooldown of .* from 0, not -1"),
        (
            lambda: ar.callbacks.EarlyStopping(patience=-1),
            "patience of EarlyStopping is an integer from 0, not -1",
        ),
        (lambda: untyped.EarlyStopping(patience=2.5), "patience of .* from 0, not 2.5"),
        (lambda: untyped.EarlyStopping(start_from_epoch="a"), "start_from_epoch of .*, not 'a'"),
        (
            lambda: untyped.EarlyStopping(baseline="a"),
            "baseline of EarlyStopping is a finite number, not 'a'",
        ),
        (lambda: ar.callbacks.EarlyStopping(min_delta=np.inf), "min_delta of .* number, not inf"),
        (lambda: untyped.CSVLogger(3), "CSVLogger takes filename, text or a pathlib.Path, not 3"),
        (lambda: untyped.ModelCheckpoint(b"a"), "ModelCheckpoint takes filepath, text or .* b'a'"),
        (lambda: untyped.TensorBoard(None), "TensorBoard takes log_dir, text or .* not None"),
        (
            lambda: untyped.TensorBoard("logs", write_images=True),
            "TensorBoard takes no write_images=: histogram_freq= writes",
        ),
        (lambda: untyped.TensorBoard(log_dirs="a"), "TensorBoard: .*did you mean 'log_dir'"),
        (lambda: ar.callbacks.LambdaCallback(on_epoch=print), "unknown method of a callback"),
        (lambda: ar.callbacks.ModelCheckpoint("a", save_freq="day"), "a number of batches: 'day'"),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_a_value_of_no_validation_is_told_from_a_misspelt_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for monitor in ("val_loss", "los"):
        stop = ar.callbacks.EarlyStopping(monitor)
        classifier().fit(*blobs(20), callbacks=[stop], verbose=0)
    first, second = (each for each in caplog.messages if "EarlyStopping monitors" in each)
    assert first.endswith("loss; it was not validated: pass validation_data, or validation_freq=1")
    assert second.endswith("monitors 'los', but the epoch has accuracy, loss; did you mean 'loss'?")


def test_callbacks_that_exist_elsewhere_are_explained() -> None:
    with pytest.raises(AttributeError, match=r"'BackupAndRestore': save with ModelCheckpoint"):
        _ = untyped.BackupAndRestore
    with pytest.raises(AttributeError, match="did you mean 'EarlyStopping'"):
        _ = untyped.EarlyStoping
    assert set(ar.callbacks.TABLE) == set(ar.callbacks.__all__)
