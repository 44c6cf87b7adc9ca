"""One worker of parameter servers in this process: alone, it trains as a single replica does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import parameter_server

import allreduce as ar
from allreduce.errors import MismatchError, UnsupportedError, UsageError
from allreduce.parameters.arena_store import ArenaStore
from tests.server.clusters import describe
from tests.strategies.parameter_server.small_models import (
    Worker,
    data,
    trained,
    with_averages,
    with_table,
    words,
)

LOSS = "sparse_categorical_crossentropy"


def rate() -> Any:
    return ar.optim.schedules.ExponentialDecay(0.05, decay_steps=5, decay_rate=0.5)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: ar.optim.Adam(rate()),
        lambda: ar.optim.SGD(0.1, momentum=0.9, clip_norm=0.05),
        lambda: ar.optim.Lamb(0.01, clip_value=0.01),
        lambda: ar.optim.SGD(0.1, gradient_accumulation=4, ema_momentum=0.9),
    ],
    ids=["schedule", "clip_norm", "per_variable", "accumulation"],
)
def test_one_worker_trains_as_one_replica(worker: Worker, optimizer: Callable[[], Any]) -> None:
    alone, expected = trained(None, optimizer())
    model, found = trained(worker(servers=2), optimizer())
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)
    for mine, its in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
    slots, its_slots = model.optimizer.state(), alone.optimizer.state()
    for mine, its in zip(slots.values(), its_slots.values(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("total", [1, 2])
def test_synchronous_updates_of_one_gradient_are_those_of_one_replica(
    worker: Worker, total: int
) -> None:
    _, expected = trained(None, ar.optim.Adam(0.01))
    options = {"update": "sync", "replicas_to_aggregate": 1, "total_replicas": total}
    _, found = trained(worker(**options), ar.optim.Adam(0.01))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["val_loss"], expected["val_loss"], rtol=1e-5)


@pytest.mark.parametrize("kind", ["averages", "table"])
def test_workers_without_rows_initialise_variables_and_get_their_values(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ar.set_seed(5)
    strategy = worker(workers=2)
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:1")
    monkeypatch.setattr(parameter_server, "_made", itertools.count(strategy._number))
    other = ar.ParameterServerStrategy(timeout=20)
    workers, has_trained = [strategy, other], threading.Event()
    x, y = words() if kind == "table" else data()
    if kind == "table":
        models = [with_table(each, ar.optim.SGD(0.1)) for each in workers]
    else:
        models = [with_averages(each) for each in workers]

    class Waits(ar.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            has_trained.wait(25)

    class Trains(ar.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            has_trained.set()

    def fit(model: Any, callback: Any) -> None:
        options: dict[str, Any] = {"batch_size": len(x), "epochs": 1, "verbose": 0}
        model.fit(x, y, callbacks=[callback], **options)

    def fit_both() -> None:
        has_trained.clear()
        chief = threading.Thread(target=fit, args=(models[0], Waits()))
        chief.start()
        fit(models[1], Trains())
        chief.join(40)
        assert has_trained.is_set()

    fit_both()
    assert strategy.status()["updates"] == {"/job:ps/task:0": 1}
    models[0].set_weights([np.zeros_like(each) for each in models[0].get_weights()])
    fit_both()
    np.testing.assert_allclose(models[1].history.history["loss"], np.log(2), rtol=1e-6)
    for mine, its in zip(*(each.get_weights() for each in models), strict=True):
        np.testing.assert_array_equal(mine, its)
    other.close()


@pytest.mark.parametrize(
    ("different", "said"),
    [
        ({"x": data()[0] + 1}, r"samples=.*x \(230, 6\)"),
        ({"validation_data": (data()[0][1:51], data()[1][:50])}, r"samples=.*validation x"),
        ({"shuffle": False}, "shuffle=False, but on the chief shuffle=True"),
    ],
    ids=["x", "validation", "shuffle"],
)
def test_workers_with_other_samples_are_refused(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, different: dict[str, Any], said: str
) -> None:
    ar.set_seed(5)
    strategy = worker(workers=2)
    trained(strategy, "sgd")
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:1")
    monkeypatch.setattr(parameter_server, "_made", itertools.count(strategy._number))
    other = ar.ParameterServerStrategy(timeout=20)
    with pytest.raises(MismatchError, match=said):
        trained(other, "sgd", **different)
    other.close()


def test_callbacks_change_the_rate_and_stop(worker: Worker) -> None:
    def callbacks() -> list[Any]:
        change = ar.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        stop = ar.callbacks.EarlyStopping("loss", min_delta=10.0, patience=2)
        return [change, stop]

    _, expected = trained(None, ar.optim.SGD(0.1), callbacks=callbacks(), epochs=9)
    _, found = trained(worker(), ar.optim.SGD(0.1), callbacks=callbacks(), epochs=9)
    assert len(found["loss"]) == len(expected["loss"]) < 9
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


def test_moving_averages_are_the_chiefs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    alone = with_averages(None)
    alone.fit(x, y, batch_size=32, epochs=2, verbose=0)
    model = with_averages(worker(workers=2))
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    for mine, its in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:1")
    monkeypatch.setattr(parameter_server, "_made", itertools.count(model.replicator._number))
    other = ar.ParameterServerStrategy(timeout=20)  # it comes when all is done
    late = with_averages(other)
    late.train_on_batch(x[:1], y[:1])
    averages = [each for each in late.variables if not each.trainable]
    expected = [each for each in model.variables if not each.trainable]
    other.refresh(slots=False)
    for mine, its in zip(averages, expected, strict=True):
        np.testing.assert_array_equal(mine.numpy(), its.numpy())
    other.close()


def test_the_updates_of_other_workers_count_for_schedules(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ar.set_seed(5)
    strategy = worker(workers=2)
    model, _ = trained(strategy, ar.optim.SGD(rate()))
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:1")
    monkeypatch.setattr(parameter_server, "_made", itertools.count(strategy._number))
    other = ar.ParameterServerStrategy(timeout=20)
    late, _ = trained(other, ar.optim.SGD(rate()))
    for _ in range(3):
        late.train_on_batch(*data())
    strategy.refresh(slots=False)
    assert model.optimizer.iterations == 27
    assert model.optimizer.learning_rate == rate()(27)
    other.close()


def test_written_averages_are_no_updates(worker: Worker) -> None:
    x, y = data()
    strategy = worker()
    tests = {"validation_data": (x, y), "validation_batch_size": 4}
    with_averages(strategy).fit(x[:64], y[:64], batch_size=32, epochs=1, verbose=0, **tests)
    assert strategy.status()["updates"] == {"/job:ps/task:0": 2}


def test_assigned_values_reach_the_servers(worker: Worker) -> None:
    model, _ = trained(worker(), ar.optim.SGD(0.1))
    model.set_weights([np.zeros_like(each) for each in model.get_weights()])
    model.compile(optimizer=ar.optim.SGD(0.0), loss=model._steps().loss)
    x, y = data()
    model.fit(x, y, verbose=0)
    assert not any(each.any() for each in model.get_weights())


def test_another_strategy_trains_anew(worker: Worker) -> None:
    first = worker()
    _, expected = trained(first, ar.optim.SGD(0.1))
    second = ar.ParameterServerStrategy(timeout=20)
    _, found = trained(second, ar.optim.SGD(0.1))
    second.close()
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)


def test_a_saved_model_goes_on_elsewhere(worker: Worker, tmp_path: Path) -> None:
    model, _ = trained(worker(), ar.optim.Adam(0.01))
    model.save(tmp_path / "model.safetensors")
    loaded = ar.nn.load_model(tmp_path / "model.safetensors")
    assert loaded.optimizer.state()["iterations"] == 24
    for name, slot in model.optimizer.state().items():
        np.testing.assert_array_equal(loaded.optimizer.state()[name], slot)


def own_step(strategy: Any) -> Callable[[], float]:
    """Return a function that runs one training step and returns its loss."""
    with strategy.scope():
        weights = ar.Variable(np.zeros(6, np.float32), name="weights")
        optimizer = ar.optim.Adam(0.1)
    x, _ = data()
    y = x @ np.arange(6, dtype=np.float32)

    @ar.function
    def step(x: Any, y: Any) -> Any:
        loss = ar.ops.square(x @ weights - y)
        optimizer.minimize(loss, [weights])
        return loss

    return lambda: float(np.mean(strategy.run(step, (x, y)).values[0]))


@pytest.mark.parametrize(("size", "total"), [(2, 2), (4, 10), (2, 10)])
def test_a_loop_of_ones_own_goes_on_without_a_worker_that_has_ended(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, size: int, total: int
) -> None:
    sizes: dict[str, Any] = {"replicas_to_aggregate": size, "total_replicas": total}
    strategy = worker(workers=2, update="sync", **sizes)
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:1")
    monkeypatch.setattr(parameter_server, "_made", itertools.count(strategy._number))
    other = ar.ParameterServerStrategy(timeout=20, update="sync", **sizes)
    first, second = own_step(strategy), own_step(other)
    for _ in range(size):
        loss = first(), second()
    other.close()
    assert [first() for _ in range(30)][-1] < loss[0]
    assert strategy.status()["updates"]["/job:ps/task:0"] >= 30 // size


@pytest.mark.parametrize(
    "options",
    [{}, {"update": "sync"}, {"staleness": 2}, {"update": "sync", "replicas_to_aggregate": 2}],
    ids=str,
)
def test_a_loop_of_ones_own_learns(worker: Worker, options: dict[str, Any]) -> None:
    strategy = worker(**options)
    step = own_step(strategy)
    losses = [step() for _ in range(60)]
    assert losses[-1] < losses[0] / 5
    found = strategy.status()
    assert found["updates"] == {"/job:ps/task:0": 60 // options.get("replicas_to_aggregate", 1)}
    assert found["workers"] == ["worker:0"]
    expected = {"update": {}, "staleness": {0: 1, 1: 59}}
    assert found["staleness"] == expected.get(next(iter(options), ""), {0: 60})


def test_gradients_that_overtake_each_other_all_count(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed, second = itertools.count(), threading.Event()
    push = ArenaStore.push

    def late(*arguments: Any) -> int:
        """Let the second gradient in first."""
        number = next(pushed)
        if number == 0:
            assert second.wait(20)
        stale = push(*arguments)
        if number == 1:
            second.set()
        return stale

    monkeypatch.setattr(ArenaStore, "push", late)
    strategy = worker(staleness=2)
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(2, activation="softmax")])
        model.compile("sgd", LOSS)
    x, y = data()
    for _ in range(3):
        model.train_on_batch(x, y)
    strategy.refresh(slots=False)
    assert strategy.status()["updates"] == {"/job:ps/task:0": 3}


def test_what_cannot_be_is_said_in_one_line(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = worker()
    x, y = data()
    with pytest.raises(UnsupportedError, match="rows of arrays"):
        trained(strategy, "sgd", validation_data=[(x, y)])
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(2)])
        model.compile("sgd", LOSS, run_eagerly=True)
    with pytest.raises(UnsupportedError, match="turn run_eagerly"):
        model.fit(x, y, verbose=0)
    for options, said in (
        ({"replicas_to_aggregate": 2}, 'for update="sync"'),
        ({"update": "sync", "staleness": 1}, "synchronous ones have none"),
        (
            {"update": "sync", "replicas_to_aggregate": 4, "total_replicas": 2},
            "total_replicas is at least replicas_to_aggregate",
        ),
        ({"stalenes": 1}, "did you mean 'staleness'"),
        ({"timeout": 0}, "expected seconds above 0"),
        ({"checkpoint": 5}, "a folder's path, not 5"),
    ):
        with pytest.raises(UsageError, match=said):
            ar.ParameterServerStrategy(**options)
    monkeypatch.setenv("ALLREDUCE_TASK", "ps:0")
    with pytest.raises(UsageError, match="it is for workers"):
        ar.ParameterServerStrategy()
    monkeypatch.delenv("ALLREDUCE_CLUSTER")
    with pytest.raises(UsageError, match="not name this process's task"):
        ar.ParameterServerStrategy(describe({"ps": 1, "worker": 1}))
    for jobs, task, said in (
        ({"worker": 1}, "worker:0", "no ps task, only worker; add one"),
        ({"ps": 1, "wroker": 1}, "wroker:0", "no job worker or chief, only ps, wroker"),
    ):
        monkeypatch.setenv("ALLREDUCE_CLUSTER", describe(jobs).as_json())
        monkeypatch.setenv("ALLREDUCE_TASK", task)
        with pytest.raises(UsageError, match=said):
            ar.ParameterServerStrategy()
    monkeypatch.delenv("ALLREDUCE_TASK")
    monkeypatch.delenv("ALLREDUCE_CLUSTER")
    with pytest.raises(UsageError, match="--cluster ps=1,worker=2"):
        ar.ParameterServerStrategy()


@pytest.mark.parametrize("options", [{}, {"update": "sync"}, {"staleness": 1}], ids=str)
def test_a_table_on_two_servers_trains_as_a_whole_one(
    worker: Worker, options: dict[str, Any]
) -> None:
    x, y = words()
    alone = with_table(None, ar.optim.Adagrad(0.1))
    expected = alone.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    model = with_table(worker(servers=2, **options), ar.optim.Adagrad(0.1))
    found = model.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    if not options.get("staleness"):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(model.predict(x), alone.predict(x), rtol=1e-4, atol=1e-5)
    assert found[-1] < found[0]


def test_a_table_refuses_what_it_cannot_do(worker: Worker) -> None:
    x, y = words()
    strategy = worker()
    with pytest.raises(UnsupportedError, match="clip_norm cannot update table"):
        with_table(strategy, ar.optim.SGD(0.1, clip_norm=1.0)).fit(x, y, verbose=0)
    with pytest.raises(UsageError, match="vectors for whole numbers from 0 to 39"):
        with_table(strategy, ar.optim.SGD(0.1)).fit(x + 1, y, verbose=0)
