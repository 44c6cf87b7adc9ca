"""Several micro-batches make one update: the same as one batch of all their samples."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

import allreduce as ar
from allreduce import events, nn, optim
from allreduce.errors import UsageError
from tests.harness import collector_off, run_ranks

X = np.random.default_rng(3).normal(size=(90, 6)).astype(np.float32)
Y = np.tanh(X @ np.random.default_rng(4).normal(size=(6, 2))).astype(np.float32)
# One update of the second kind has the samples of 4 micro-batches, the epoch's last one 10.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": lambda: optim.SGD(0.1)},
    "clipped": {"optimizer": lambda: optim.AdamW(0.01, epsilon=1e-3, clip_norm=0.05)},
    "clipped in slices": {
        "optimizer": lambda: optim.AdamW(0.01, epsilon=1e-3, clip_norm=0.05),
        "units": 400,
    },
    "sharded": {"optimizer": lambda: optim.Adam(0.01, epsilon=1e-3), "units": 400},
    "per variable": {"optimizer": lambda: optim.Lamb(0.01, epsilon=1e-3)},
    "scheduled": {"optimizer": lambda: optim.SGD(optim.schedules.ExponentialDecay(0.2, 2, 0.5))},
}


def trained(
    strategy: Any, optimizer: Any, count: int, units: int = 8, **options: Any
) -> tuple[list[np.ndarray], int]:
    """Train for 3 epochs of batches of 40 samples, in `count` micro-batches each."""
    ar.set_seed(5)
    with strategy.scope():
        hidden = [nn.Dense(units, activation="tanh") for _ in range(2)]
        model = nn.Sequential([*hidden, nn.Dense(2)])
        model.compile(optimizer(), "mse", gradient_accumulation=count, **options)
    model.fit(X, Y, batch_size=40 // count, epochs=3, shuffle=False, verbose=0)
    return model.get_weights(), model.optimizer.iterations


def strategy_of(replicas: int) -> Any:
    ar.config.set_logical_devices("CPU", 4)
    return MirroredStrategy([f"CPU:{place}" for place in range(replicas)])


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_train_as_their_batch_does(case: str, replicas: int) -> None:
    wanted, updates = trained(strategy_of(replicas), count=1, **CASES[case])
    assert updates == 9
    for count, options in ((4, {}), (2, {}), (4, {"run_eagerly": True})):
        found, updates = trained(strategy_of(replicas), count=count, **CASES[case], **options)
        assert updates == 9  # the last of each epoch with what is left
        for value, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=2e-6)


def _ranks() -> None:
    """Train with and without accumulation on several ranks, and compare."""
    import numpy as np

    import allreduce as ar
    from tests.optim.test_accumulation import CASES, trained

    for everywhere in (False, True):
        ar.config.set_shard_everywhere(everywhere)
        strategy = ar.MultiWorkerMirroredStrategy()
        for options in CASES.values():
            wanted, updates = trained(strategy, count=1, **options)
            found, others = trained(strategy, count=4, **options)
            assert updates == others == 9
            for value, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(value, other, rtol=1e-4, atol=2e-6)
    print("alike")


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [pytest.param(2, "shared", marks=pytest.mark.torture), (4, "shared"), (2, "tcp")],
)
def test_ranks_accumulate_over_every_transport(ranks: int, transport: str) -> None:
    results = run_ranks(_ranks, ranks, env={"ALLREDUCE_TRANSPORT": transport})
    assert [result.stdout.strip() for result in results] == ["alike"] * ranks


class Loop:
    """A loop of one's own, whose gradients are integers: sums of micro-batches are exact."""

    def __init__(self, replicas: int, **options: Any) -> None:
        self.strategy = strategy_of(replicas)
        with self.strategy.scope():
            self.w = ar.Variable(np.zeros(3), name="w")
        self.optimizer = optim.SGD(1.0, **options)

        @ar.function
        def step(x: Any) -> None:
            self.optimizer.minimize(ar.ops.sum(x * self.w, axis=1), [self.w])

        self.step = step

    def run(self, rows: np.ndarray) -> None:
        for batch in self.strategy.distribute_dataset([(rows,)]):
            self.strategy.run(self.step, args=batch)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_means_of_uneven_micro_batches_are_exact(replicas: int) -> None:
    rows = np.arange(39.0).reshape(13, 3)
    loop = Loop(replicas, gradient_accumulation=3)
    for start, stop in ((0, 7), (7, 8), (8, 13)):
        np.testing.assert_array_equal(loop.w.numpy(), 0)
        loop.run(rows[start:stop])  # with replicas that have no rows of some
    np.testing.assert_array_equal(loop.w.numpy(), -rows.sum(0) / 13)
    assert loop.optimizer.iterations == 1
    loop.run(rows[:2])
    loop.optimizer.finish_update()
    np.testing.assert_array_equal(loop.w.numpy(), -rows.sum(0) / 13 - rows[:2].mean(0))
    loop.optimizer.finish_update()  # of nothing
    assert loop.optimizer.iterations == 2


def test_gradients_are_reduced_once_per_update(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(2, gradient_accumulation=4)
    calls: list[events.Event] = []
    end = events.subscribe(calls.append)
    for _ in range(8):
        loop.run(np.ones((4, 3)))
    end()
    assert sum(each.name == "all_reduce_bucket" for each in calls) == 2 * 2  # of each replica
    ar.observe.explain(loop.strategy, loop.step)
    said = capsys.readouterr().out
    assert "of 8 steps, 2 reduced gradients and changed variables" in said
    assert said.count("bucket 0 (") == 1


def test_memory_is_that_of_one_gradient() -> None:
    peaks = []
    ar.config.set_logical_devices("CPU", 4)
    for count in (1, 8):
        strategy = MirroredStrategy([f"CPU:{count // 8}"])
        trained(strategy, lambda: optim.SGD(0.1), 1, units=400)
        with collector_off():
            before = ar.config.get_memory_info(f"CPU:{count // 8}")["current"]
            trained(strategy, lambda: optim.SGD(0.1), count, units=400)
            peaks.append(ar.config.get_memory_info(f"CPU:{count // 8}")["peak"] - before)
    one_gradient = 400 * 400 * 4
    assert peaks[1] < peaks[0] + 1.5 * one_gradient  # one that is added, not one of each


def test_a_loop_that_never_updates_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop: Any = Loop(1, gradient_accumulation=8)
    for _ in range(5):
        loop.run(np.ones((2, 3)))
    loop = None
    gc.collect()
    assert "SGD(gradient_accumulation=8) has changed nothing: after 5 micro-batches" in caplog.text


def test_an_error_in_a_micro_batch_discards_the_update() -> None:
    optimizer = optim.SGD(1.0, gradient_accumulation=2)
    model = nn.Sequential([nn.Input((3,)), nn.Dense(2)])
    start = [value.copy() for value in model.get_weights()]

    @ar.function
    def step(x: Any, y: Any) -> None:
        loss = nn.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
        optimizer.minimize(loss, model.trainable_variables)

    x = np.ones((2, 3), np.float32)
    step(x, np.array([0, 1]))
    with pytest.raises(UsageError, match="label"):
        step(x, np.array([0, 9]))
    step(x, np.array([0, 1]))
    for value, other in zip(model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(value, other)  # a first micro-batch again
    step(x, np.array([0, 1]))
    assert optimizer.iterations == 1


def test_the_number_is_checked_and_saved(tmp_path: Any) -> None:
    for wrong in (0, 2.5, "4"):
        with pytest.raises(UsageError, match="gradient_accumulation is an integer from 1"):
            optim.SGD(gradient_accumulation=wrong)  # type: ignore[arg-type]
    model = nn.Sequential([nn.Input((6,)), nn.Dense(2)])
    with pytest.raises(UsageError, match="gradient_accumulation is an integer from 1"):
        model.compile("sgd", "mse", gradient_accumulation=0)
    model.compile("sgd", "mse", gradient_accumulation=4)
    model.save(tmp_path / "model")
    assert nn.load_model(tmp_path / "model").optimizer.gradient_accumulation == 4
    loop = Loop(1)
    loop.run(np.ones((2, 3)))
    loop.optimizer.gradient_accumulation = 2
    with pytest.raises(UsageError, match="set to 2 after a step with it had been traced"):
        loop.run(np.ones((2, 3)))


_DIFFERING = """
import numpy as np
import allreduce as ar

strategy = ar.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ar.Variable(np.zeros(3), name="w")
optimizer = ar.optim.SGD(1.0, gradient_accumulation=3)


@ar.function
def step(x):
    optimizer.minimize(ar.ops.sum(x * w, axis=1), [w])


@ar.function
def other(x):
    optimizer.minimize(ar.ops.sum(2 * x * w, axis=1), [w])


rank = strategy.communicator.rank
try:
    for each in (other if rank else step, step, step):
        strategy.run(each, args=(np.ones((2, 3)),))
except ar.errors.MismatchError as error:
    print(error)
"""


def test_ranks_that_accumulated_otherwise_find_out() -> None:
    for result in run_ranks(_DIFFERING, 2):
        assert "the update's earlier micro-batches has one value on rank 0 but" in result.stdout
