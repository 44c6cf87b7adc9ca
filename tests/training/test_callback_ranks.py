"""Callbacks, weights and iterables of batches on several ranks: equal numbers, errors on all."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import numpy as np
import pytest

from tests.harness import run_ranks


def train(folder: str, devices: int) -> None:
    """Fit in several ways, and print all histories."""
    import json
    import os
    from typing import Any

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    ar.config.set_logical_devices("CPU", devices)
    strategy = ar.MultiWorkerMirroredStrategy()
    rank, size = strategy.communicator.rank, strategy.communicator.size
    x, y = blobs(203)
    found: list[Any] = []
    with strategy.scope():
        models = [classifier() for _ in range(5)]
    seen: list[Any] = []
    stop = ar.callbacks.EarlyStopping(monitor="loss", min_delta=0.2, restore_best_weights=True)
    path = f"{folder}/best.safetensors"
    calls = [
        ar.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs)),
        ar.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True),
        ar.callbacks.ReduceLROnPlateau(monitor="accuracy", patience=1, factor=0.5),
        ar.callbacks.CSVLogger(f"{folder}/log.csv"),
        stop,
    ]
    history = models[0].fit(
        *(x, y, 77, 8),
        callbacks=calls,
        validation_split=0.2,
        class_weight={0: 2.0},
        verbose=0,
    )
    with strategy.scope():
        loaded = ar.nn.load_model(path)
    found += [history.history, seen, stop.stopped_epoch]
    found += [model.evaluate(x, y, verbose=0) for model in (models[0], loaded)]

    def generator() -> Any:
        for at in range(0, 203, 77):
            yield x[at : at + 77], y[at : at + 77]

    found.append(models[1].fit(generator(), verbose=0).history)
    found.append(models[1].evaluate(generator(), verbose=0))
    found.append(models[1].predict(generator(), verbose=0).tolist())

    def endless() -> Any:
        while True:
            yield from generator()

    batches = endless()  # one for several calls, in each of which all ranks draw as many
    for _ in range(2):
        found.append(models[1].fit(batches, epochs=2, steps_per_epoch=2, verbose=0).history)
        found.append(models[1].evaluate(batches, steps=1, verbose=0))

    def own(parts: int) -> Any:
        """This rank's part of each batch."""
        for own_x, own_y in generator():
            rows = np.array_split(np.arange(len(own_x)), parts)[rank]
            yield own_x[rows], own_y[rows]

    found.append(models[2].fit(own(size), data="sharded", verbose=0).history)
    found.append(models[3].train_on_batch(x, y, sample_weight=np.linspace(0, 1, 203)))
    weights = np.linspace(0, 1, 203)
    found.append(models[3].test_on_batch(x, y, sample_weight=weights))
    found.append(models[3].predict_on_batch(x).tolist())

    # Each rank's function gives another rate; rank 0's is taken.
    schedule = ar.callbacks.LearningRateScheduler(lambda epoch: 0.02 / (epoch + 1) / (rank + 1))
    history = models[4].fit(x, y, 77, 3, callbacks=[schedule], verbose=0)
    assert history.history["learning_rate"] == [0.02, 0.01, 0.02 / 3]
    found.append(history.history)

    with strategy.scope():
        ar.set_seed(1)
        binary = ar.nn.Sequential([ar.nn.Dense(1, activation="sigmoid")])
        measures = ["precision", "auc"]
        binary.compile(ar.optim.SGD(0.01), "bce", measures, weighted_metrics=measures)
    labels = (y[:, None] > 0).astype("float32")
    history = binary.fit(x, labels, 77, 2, sample_weight=weights, verbose=0)
    found.append(history.history)

    with strategy.scope():
        ar.set_seed(1)
        norm = ar.nn.BatchNorm(synchronized=True)
        layers = [ar.nn.Dense(8), norm, ar.nn.Dense(3, activation="softmax")]
        normed = ar.nn.Sequential(layers)
        optimizer = ar.optim.SGD(0.1, ema_momentum=0.9)
        loss = "sparse_categorical_crossentropy"
        normed.compile(optimizer, loss, gradient_accumulation=4)
    found.append(normed.fit(x, y, 20, 3, verbose=0).history)
    assert optimizer.iterations == 9  # of 11 micro-batches in each epoch
    found.append(np.concatenate([value.ravel() for value in normed.get_weights()]).tolist())
    before = normed.evaluate(x, y, verbose=0)
    with optimizer.averaged(normed.trainable_variables):
        found.append(normed.evaluate(x, y, verbose=0))
        assert found[-1] != before
    assert normed.evaluate(x, y, verbose=0) == before
    assert os.path.exists(path)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], typing.Any]:
    """What each rank printed, by the numbers of ranks and of each one's devices."""
    found = {}
    for ranks, devices in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4)):
        folder = tmp_path_factory.mktemp("saved")
        results = run_ranks(train, ranks, arguments=(str(folder), devices), timeout=120)
        for result in results:
            assert result.returncode == 0, result.stderr
        lines = [json.loads(result.stdout.splitlines()[-1]) for result in results]
        assert all(line == lines[0] for line in lines)
        rows = (folder / "log.csv").read_text().splitlines()
        assert len(rows) == 1 + len(lines[0][0]["loss"])
        found[ranks, devices] = lines[0]
    return found


def same(found: typing.Any, expected: typing.Any) -> None:
    """Compare nested numbers; single-precision steps differ in their last bits."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            same(found[name], expected[name])
    else:
        try:
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        except TypeError:
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                same(one, other)


@pytest.mark.parametrize("how", [(2, 1), (4, 1), (1, 2), (1, 4)])
def test_ranks_and_devices_give_the_numbers_of_one(
    runs: dict[tuple[int, int], typing.Any], how: tuple[int, int]
) -> None:
    assert runs[1, 1][2] > 0  # it was stopped early
    for found, expected in zip(runs[how], runs[1, 1], strict=True):
        same(found, expected)


def ends_early() -> None:
    import json
    from typing import Any

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    rank = strategy.communicator.rank
    x, y = blobs(40)
    with strategy.scope():
        models = [classifier() for _ in range(5)]
    found: list[Any] = []

    def batches(count: int, rows: int = 8) -> Any:
        for at in range(count):
            yield x[at * 8 : at * 8 + rows], y[at * 8 : at * 8 + rows]

    # Rank 1 has fewer batches, and fewer rows in each.
    history = models[0].fit(batches(3 - rank, 8 - rank), epochs=2, data="sharded", verbose=0)
    found.append([models[0].optimizer.iterations, history.history])

    class Stopper(ar.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if rank == 1 and epoch == 1:
                self.model.stop_training = True
            self.model.optimizer.learning_rate = 0.1 / (rank + 1)

    history = models[1].fit(x, y, 20, 5, callbacks=[Stopper()], verbose=0)
    found.append([history.epoch, models[1].optimizer.learning_rate])

    class Failing(ar.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if rank == 1:
                raise RuntimeError("no more disk")

    def broken() -> Any:
        yield from batches(1)
        if rank == 1:
            raise RuntimeError("no more tape")
        yield from batches(1)

    other = [(x[:8], y[:8] if rank else (y[:8] + 1) % 3)]
    kinds = [(x[:8].astype("float64") if rank else x[:8], y[:8])]
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        ([x, y], {"callbacks": [Failing()]}),
        ([broken()], {}),
        ([other], {}),
        ([kinds], {}),
    ]
    for model, (given, options) in zip([*models[2:], models[2]], calls, strict=True):
        try:
            model.fit(*given, **{"verbose": 0, **options})
        except (ar.MismatchError, RuntimeError) as error:
            found.append([type(error).__name__, str(error)])
    found.append(np.isfinite(models[2].fit(x, y, verbose=0).history["loss"]).all().item())
    print(json.dumps(found))


def test_ranks_end_and_fail_together() -> None:
    results = run_ranks(ends_early, 2)
    for result in results:
        assert result.returncode == 0, result.stderr
    first, second = (json.loads(result.stdout.splitlines()[-1]) for result in results)
    assert first[:2] == second[:2]
    assert first[0][0] == 2  # both took as many steps as rank 1 had batches
    assert "rank 1 have ended after 2; all ranks end here" in results[0].stderr
    assert first[1] == [[0, 1], 0.1]  # rank 1 stopped both; both use rank 0's rate
    assert second[2] == ["RuntimeError", "no more disk"]
    assert second[3] == ["RuntimeError", "no more tape"]
    for (kind, text), place, said in (
        (first[2], "Failing.on_epoch_end", "no more disk"),
        (first[3], "batch 1", "no more tape"),
    ):
        assert kind == "MismatchError"
        assert text.startswith(f"rank 0: {place} raised on rank 1:\nTraceback")
        assert text.endswith(f"RuntimeError: {said}")
    for found in (first, second):
        assert "ranks have batches with different rows or values" in found[4][1]
        assert "rank 0: x float32 (rows, 6), y int64 (rows,); rank 1: x float64" in found[5][1]
        assert found[6] is True  # errors on all ranks leave them able to go on


def dies(where: str) -> None:
    from typing import Any

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()

    def fail(batch: int, logs: Any) -> None:
        if strategy.communicator.rank == 1 and batch == 1:
            print("raises", flush=True)
            raise RuntimeError("this rank is out")

    def batches() -> Any:
        x, y = blobs(40)
        for batch in range(20):
            if batch == 1:
                fail(batch, None)
            yield x, y

    fails = ar.callbacks.LambdaCallback(on_train_batch_begin=fail)
    if where == "callback":
        model.fit(*blobs(40), 8, 5, callbacks=[fails], verbose=0)
    else:
        model.fit(batches(), verbose=0)


@pytest.mark.parametrize("where", ["callback", "generator"])
@pytest.mark.parametrize("launcher", ["env", "run"])
def test_an_error_of_one_rank_ends_all_with_its_traceback(launcher: str, where: str) -> None:
    # Before a wait's timeout, which is longer.
    results = run_ranks(dies, 2, launcher=launcher, arguments=(where,), timeout=60)
    assert "".join(result.stdout for result in results).count("raises") == 1
    assert all(result.returncode for result in results)
    assert "RuntimeError: this rank is out" in "".join(result.stderr for result in results)
    if launcher == "env":
        place = "LambdaCallback.on_train_batch_begin" if where == "callback" else "batch 1"
        assert f"{place} raised on rank 1" in results[0].stderr


def checkpoint_fails(folder: str) -> None:
    import json

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()
    save = ar.callbacks.ModelCheckpoint(f"{folder}/none/model")
    try:
        model.fit(*blobs(40), 8, callbacks=[save], verbose=0)
    except ar.AllreduceError as error:
        print(json.dumps(str(error)))


def test_a_file_that_rank_0_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(checkpoint_fails, 2, arguments=(str(tmp_path),))):
        text = json.loads(result.stdout.splitlines()[-1])
        said = f"ModelCheckpoint cannot save to '{tmp_path}/none/model': there is no folder "
        if rank:  # without a traceback, which would show nothing of the user's program
            said = f"rank 1: ModelCheckpoint.on_train_begin raised on rank 0: UsageError: {said}"
        assert text.startswith(said)


def stops_at_a_nan() -> None:
    import json

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    x, y = blobs(60)
    with strategy.scope():
        model, short = classifier(), classifier()
    short.fit(x[:40], y[:40], 20, shuffle=False, verbose=0)
    x[41] = np.nan  # rank 0's, in the third batch
    stop = ar.callbacks.TerminateOnNaN()
    history = model.fit(x, y, 20, 5, shuffle=False, callbacks=[stop], verbose=0)
    same = [
        bool(np.allclose(one, other, rtol=1e-6))
        for one, other in zip(model.get_weights(), short.get_weights(), strict=True)
    ]
    print(json.dumps([history.epoch, same]))


def test_a_nan_on_one_rank_ends_all_with_the_weights_of_before() -> None:
    for result in run_ranks(stops_at_a_nan, 2):
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout.splitlines()[-1]) == [[0], [True] * 4]


def _ranks_that_warn() -> None:
    import logging

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    rank = strategy.communicator.rank
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("allreduce").addHandler(handler)
    x, y = blobs(40)
    with strategy.scope():
        model = classifier()
    model.fit(((x, y) for _ in range(2)), epochs=3, verbose=0)
    assert ["no more batches for epoch 2 of 3" in each for each in found] == [True] * (rank == 0)
    found.clear()
    weights = {7: 2.0, 0: 2.0, 1: 3.0}
    for data in ("same", "sharded"):
        own = y if data == "same" else np.full(40, rank)  # each class is on one rank only
        model.fit(x, own, class_weight=weights, verbose=0, data=data)
        said = ["fit: class_weight has a weight for class 7, which is not in y; a class without a "]
        assert [each.removesuffix("weight counts 1") for each in found] == said * (rank == 0)
        found.clear()


def test_only_rank_0_warns_of_absent_classes_and_batches() -> None:
    for result in run_ranks(_ranks_that_warn, 2):
        assert result.returncode == 0, result.stderr
