"""Steps that run op by op: the same results as traced ones, with values to look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.errors import MismatchError, NumericsError, ShapeError, UsageError
from allreduce.graph.core import op_table
from tests.graph.eager.eager_cases import NETWORKS, X, trained
from tests.harness import run_ranks

ROWS = X.reshape(9, -1)[:, :3].astype(np.float64)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_current", options.Options())


@pytest.fixture
def pair() -> Iterator[ar.Strategy]:
    ar.config.set_logical_devices("CPU", 4)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    yield strategy
    strategy.close()


def _run(strategy: ar.Strategy, step: Any, *arrays: np.ndarray) -> Any:
    (batch,) = strategy.distribute_dataset([arrays])
    return strategy.run(step, args=batch, eagerly=True)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_training_gives_the_same_bits_as_a_trace(network: str, replicas: int) -> None:
    ar.config.set_logical_devices("CPU", 4)
    strategy = ar.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    traced = trained(NETWORKS[network], strategy, eagerly=False)
    eager = trained(NETWORKS[network], strategy, eagerly=True)
    for one, other in zip(traced, eager, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_seed_that_is_set_between_steps_counts_as_in_a_trace(replicas: int) -> None:
    strategy = ar.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    network = ar.nn.Sequential([ar.nn.Input((3,)), ar.nn.Dropout(0.5)])

    @ar.function
    def step(x: Any) -> Any:
        return network(x, training=True), ar.ops.normal((x.shape[0], 2))

    def draws(eagerly: bool) -> list[np.ndarray]:
        strategy.set_steps(step, 0)
        found = []
        for seed in (0, 5, 0, 5):
            ar.set_seed(seed)
            (batch,) = strategy.distribute_dataset([(ROWS,)])
            for value in strategy.run(step, args=batch, eagerly=eagerly):
                found.append(strategy.gather(value, axis=0))
        return found

    with strategy.scope():
        traced, eager = draws(False), draws(True)
    strategy.close()
    for one, other in zip(traced, eager, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len({each.tobytes() for each in traced}) == len(traced)


def ranks() -> None:
    import numpy as np

    import allreduce as ar
    from tests.graph.eager.eager_cases import NETWORKS, X, trained

    strategy = ar.MultiWorkerMirroredStrategy()
    for make in NETWORKS.values():
        pairs = zip(*(trained(make, strategy, eagerly) for eagerly in (False, True)), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)

    def step(x: object) -> object:
        total = ar.all_reduce(ar.ops.sum(x))
        if strategy.communicator.rank == 1:
            raise RuntimeError("rank 1 has had enough")
        return ar.all_reduce(total)

    def mixed_up(x: object) -> object:
        op = ("min", "max")[strategy.communicator.rank]
        return ar.all_reduce(ar.ops.sum(x), op=op)

    for fn in (mixed_up, step):
        try:
            strategy.run(fn, args=(X,), eagerly=True)
        except (RuntimeError, ar.MismatchError, ar.PeerLostError) as error:
            print(f"{type(error).__name__}: {error}")


def test_ranks_agree_with_a_trace_and_hear_of_what_went_wrong() -> None:
    results = run_ranks(ranks, 2)
    assert [result.returncode for result in results] == [0, 0], results
    for result in results:
        assert "op='min') float32 () (" in result.stdout, result
        assert "on rank 0 but all_reduce(%1, op='max') float32 (" in result.stdout
    assert "PeerLostError" in results[0].stdout
    assert "rank 1 has had enough" in results[0].stdout
    assert "RuntimeError: rank 1 has had enough" in results[1].stdout


def test_values_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    w = ar.Variable(np.array([1.0, -2.0, 0.5]), name="w")
    optimizer = ar.optim.SGD(0.1)
    kept = []

    @ar.function
    def step(x: Any) -> Any:
        y: Any = ar.ops.tanh(x @ w)
        loss = ar.ops.mean(y * y)
        print("here is", y)
        ar.print("and", loss)
        assert float(loss) > 0
        assert y.numpy().shape == (9,)
        assert len(y) == 9
        assert isinstance(np.linalg.norm(y), float)
        if ar.ops.max(y) < 2:  # a tensor decides
            loss = loss * int(ar.ops.size(y))
        (slope,) = ar.gradients(loss, [w])
        t = np.asarray(y)
        np.testing.assert_allclose(slope.numpy(), 2 * (t - t**3) @ np.asarray(x))
        optimizer.minimize(loss, [w])
        np.testing.assert_array_equal(w.numpy(), (w * 1).numpy())
        kept.append(y)
        return slope

    ar.config.run_functions_eagerly(True)
    assert ar.config.functions_run_eagerly()
    before = w.numpy()
    slope = step(ROWS)
    np.testing.assert_allclose(w.numpy(), before - 0.1 * slope.numpy())
    said = capsys.readouterr().out
    assert said.startswith("here is <tensor %")
    assert f"{np.tanh(ROWS @ before)[0]:.5f}"[:-1] in said
    assert "\nand 0." in said
    np.testing.assert_allclose((kept[0] + 1).numpy(), np.tanh(ROWS @ before) + 1)
    step(kept[0].numpy()[:, None] * np.ones(3))  # what is kept can go on


def test_it_is_switched_on_and_off_between_steps() -> None:
    seen = []

    def step(x: Any) -> Any:
        seen.append(x.has_value)
        return ar.ops.dropout(x, 0.5) + ar.ops.uniform((3,)) + ar.ops.normal((3,))

    ar.set_seed(1)
    mixed, switched = [], ar.function(step)
    for eagerly in (False, True, True, False):
        ar.config.run_functions_eagerly(eagerly)
        mixed.append(switched(ROWS).numpy())
    assert seen == [False, True, True]
    again = ar.function(lambda x: step(x))
    for expected in mixed:
        np.testing.assert_array_equal(again(ROWS).numpy(), expected)
    with pytest.raises(UsageError, match="run_functions_eagerly is True or False, not 'no'"):
        ar.config.run_functions_eagerly("no")  # type: ignore[arg-type]


def test_replicas_take_turns_and_exchange_values(pair: ar.Strategy) -> None:
    told: list[tuple[int, Any]] = []
    with pair.scope():
        total = ar.Variable(np.zeros(3), name="total")

    def step(x: Any) -> Any:
        who = int(ar.replica_id())
        told.append((who, "starts"))
        told.append((who, len(x)))
        everyones = ar.all_gather(x)
        told.append((who, len(everyones)))
        total.assign(total + ar.all_reduce(ar.ops.sum(x, axis=0)))
        told.append((who, "ends"))
        return everyones, float(ar.ops.sum(x)) if len(x) else None

    found, own = _run(pair, step, ROWS[:3])
    assert told[:4] == [(0, "starts"), (0, 2), (1, "starts"), (1, 1)]
    assert sorted(told[4:6]) == [(0, 3), (1, 3)]
    assert told[-2:] == [(0, "ends"), (1, "ends")]
    for value in found.values:
        np.testing.assert_array_equal(value, ROWS[:3])
    np.testing.assert_allclose(own.values, [ROWS[:2].sum(), ROWS[2].sum()])
    np.testing.assert_allclose(total.storage, [ROWS[:3].sum(axis=0)] * 2)


def test_an_exception_in_one_replica_ends_the_step_for_all(pair: ar.Strategy) -> None:
    with pair.scope():
        total = ar.Variable(np.zeros(3), name="total")
    ended = []

    def step(x: Any, fail: bool) -> None:
        try:
            if fail and int(ar.replica_id()) == 1:
                raise KeyError("mine")
            total.assign(total + ar.all_reduce(ar.ops.sum(x, axis=0)))
        finally:
            ended.append(ar.ops.size(x, 0))

    (batch,) = pair.distribute_dataset([(ROWS,)])
    with pytest.raises(KeyError, match="mine") as caught:
        pair.run(step, args=(*batch, True), eagerly=True)
    assert caught.traceback[-1].name == "step"
    assert sorted(map(int, ended)) == [4, 5]
    pair.run(step, args=(*batch, False), eagerly=True)
    pair.run(step, args=(*batch, False))
    np.testing.assert_allclose(total.storage, [2 * ROWS.sum(axis=0)] * 2)


def test_objects_beside_the_tensors_may_be_each_replicas_own(pair: ar.Strategy) -> None:
    class Info:
        """Told from others by identity."""

    found = _run(pair, lambda x: {"y": x * 2, "info": Info()}, ROWS)
    assert isinstance(found["info"], Info)
    np.testing.assert_array_equal(np.concatenate(found["y"].values), ROWS * 2)


def test_replicas_that_go_different_ways_are_told(pair: ar.Strategy) -> None:
    def step(x: Any) -> Any:
        if float(ar.ops.sum(x)) == ROWS[:5].sum():
            return ar.all_reduce(ar.ops.sum(x))
        return ar.ops.sum(x)

    text = r"replica 0 .* all_reduce at .*test_eager\.py:\d+, but replica 1 to the end of the step"
    with pytest.raises(MismatchError, match=text):
        _run(pair, step, ROWS)
    with pytest.raises(MismatchError, match="return the same structure"):
        _run(pair, lambda x: [x] * int(ar.replica_id() + 1), ROWS)
    with pytest.raises(MismatchError, match="return the same structure"):
        _run(pair, lambda x: x if ar.replica_id() == 0 else "none", ROWS)
    assert float(_run(pair, lambda x: ar.all_reduce(ar.ops.size(x)), ROWS).values[1]) == 27


def test_what_a_trace_refuses_is_refused(pair: ar.Strategy) -> None:
    with pair.scope():
        w = ar.Variable(np.ones(3), name="w")
    ar.config.run_functions_eagerly(True)
    optimizer = ar.optim.SGD(0.1)
    with pytest.raises(ShapeError, match=r"test_eager\.py:\d+: matmul"):
        _run(pair, lambda x: x @ np.ones(4), ROWS)
    with pytest.raises(ShapeError, match=r"take all; x\.numpy\(\) can be cut"):
        _run(pair, lambda x: x[0], ROWS)
    with pytest.raises(UsageError, match="depends on the replica's own samples"):
        _run(pair, lambda x: w.assign(ar.ops.sum(x, axis=0)), ROWS)
    with pair.scope():
        with pytest.raises(UsageError, match=r"changes variables of 2 .* call it through strategy"):
            ar.function(lambda x: optimizer.minimize(x @ w, [w]))(ROWS)
        with pytest.raises(UsageError, match=r"has collectives of 2 .* call it through strategy"):
            ar.function(lambda x: ar.all_reduce(ar.ops.sum(x)))(ROWS)
        assert float(ar.function(lambda x: ar.ops.sum(w * x))(np.ones(3))) == 3
    with pytest.raises(UsageError, match=r"was made for .*2 replicas, but the step runs on"):
        ar.function(lambda x: x * w)(ROWS)
    with pytest.raises(UsageError, match=r"MirroredStrategy with 2 replicas, but .* on another Mi"):
        _run(ar.MirroredStrategy(["CPU:0", "CPU:1"]), lambda x: x * w, ROWS)
    with pytest.raises(UsageError, match="run was called inside a step"):
        _run(pair, lambda x: pair.run(ar.ops.sum, args=(x,)), ROWS)
    with pytest.raises(UsageError, match=r"reduce was called inside a step; use ar\.all_reduce"):
        _run(pair, lambda x: pair.reduce("sum", ar.ops.sum(x)), ROWS)
    nowhere = r"test_eager\.py:\d+: .*GPU:7, which does not exist"
    with pytest.raises(UsageError, match=nowhere), ar.device("GPU:7"):
        _run(pair, ar.ops.tanh, ROWS)
    np.testing.assert_array_equal(w.storage, np.ones((2, 3)))


def test_a_users_operator_and_check_numerics_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))
    cube = ar.register_op(
        "eager_cube",
        shape=lambda specs, attrs: specs[0],
        cpu=lambda out, inputs, attrs: np.power(inputs[0], 3, out=out),
        gradient=lambda dy, y, inputs, attrs: [dy * 3.0 * inputs[0] * inputs[0]],
    )

    @ar.function
    def step(x: Any) -> Any:
        return ar.gradients(ar.ops.sum(cube(x)), [x])[0] / x

    ar.config.run_functions_eagerly(True)
    np.testing.assert_allclose(step(ROWS).numpy(), 3 * ROWS)
    ar.config.enable_check_numerics()
    with pytest.raises(
        NumericsError, match=r"replica 0, step 2: divide at .*test_eager\.py:\d+ made"
    ):
        step(np.zeros((2, 3)))


def test_a_model_can_look_at_its_values(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Clipped(ar.nn.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = ar.nn.Dense(3)

        def call(self, inputs: Any) -> Any:
            outputs = self.dense(inputs)
            print("largest", float(ar.ops.max(outputs)))
            return outputs

    model = Clipped()
    model.compile("sgd", "mse", run_eagerly=True)
    assert model.run_eagerly
    y = np.ones((9, 3))
    losses = model.fit(ROWS, y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert capsys.readouterr().out.count("largest") == 5
    model.save(tmp_path / "model")
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match="used as a float inside"):
        model.evaluate(ROWS, y, verbose=0)
    with pytest.raises(UsageError, match="run_eagerly is True or False, not 'yes'"):
        model.compile("sgd", "mse", run_eagerly="yes")  # type: ignore[arg-type]


def test_the_steps_of_a_scan_have_values() -> None:
    w = ar.Variable(np.array([0.5, -1.0, 0.2]), name="w")
    seen: list[float] = []

    def sums(x: Any) -> Any:
        def add(carry: Any, row: Any) -> Any:
            if carry.has_value:
                seen.append(float(carry))
            after = ar.ops.tanh(carry + ar.ops.sum(row * w))
            return after, after

        last, every = ar.scan(add, np.float64(0), x)
        return last, every, ar.gradients(last, [w])[0]

    traced = ar.function(sums)(ROWS)
    assert seen == []
    ar.config.run_functions_eagerly(True)
    for one, other in zip(traced, ar.function(sums)(ROWS), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-12)
    np.testing.assert_allclose(seen, [0, *traced[1].numpy()[:-1]])
