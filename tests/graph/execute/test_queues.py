"""Steps on devices that work beside the host: it waits for nothing but what it reads."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.training.totals import Totals
from tests.devices import far
from tests.graph.eager.eager_cases import NETWORKS, trained
from tests.graph.schedule.test_hazards import Recurrent, check_events, programs_of


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())
    far.install(monkeypatch)


@pytest.mark.parametrize(
    ("network", "replicas"), [("dense", 1), *((each, 2) for each in [*NETWORKS, "scan"])]
)
def test_training_is_safe_and_gives_the_same_bits(
    network: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = NETWORKS.get(network, Recurrent)  # whose scan is on the host
    found: list[list[Any]] = []

    def train(kind: str) -> None:
        strategy = ar.MirroredStrategy([f"{kind}:{i}" for i in range(replicas)])
        found.append(trained(make, strategy, eagerly=False))

    train("CPU")
    assert check_events(programs_of(monkeypatch, lambda: train("GPU"))) >= 4
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def _counting() -> Any:
    """Return a step that gives a loss, and changes a variable on the device."""
    strategy = ar.MirroredStrategy(["GPU:0"])
    with strategy.scope():
        counter = ar.Variable(np.zeros(4, np.float32))

    def step(x: Any) -> Any:
        counter.assign(counter + ar.ops.sum(x, axis=0))
        y = ar.ops.tanh(counter * 0.25)
        return ar.ops.sum(y * 2.0), ar.ops.transpose(ar.ops.stack([y, y + 1.0])), counter

    return strategy, ar.function(step)


def _expected(number: int) -> list[np.ndarray]:
    counter = np.full(4, 3.0 * sum(range(number + 1)), np.float32)
    y = np.tanh(counter * np.float32(0.25))
    return [np.asarray(np.sum(y * 2)), np.stack([y, y + 1]).T, counter]


def _batch(number: int) -> np.ndarray:
    return np.full((3, 4), number, np.float32)


def test_a_slow_copy_to_the_host_delays_nobody_but_its_reader() -> None:
    strategy, step = _counting()
    strategy.run(step, (_batch(0),))
    gpu = far.device("GPU:0")
    compute, back = gpu.own("compute"), gpu.own("device-to-host")
    back.synchronize()
    copied = back.done
    back.gate.clear()
    x, kept = _batch(0), []
    for number in range(1, 7):
        x[...] = number  # which the step has read when it returns
        kept.append(strategy.run(step, (x,)))
    compute.synchronize()  # all six steps have computed what they return
    assert back.done == copied
    del kept[2]
    back.gate.set()
    for number, results in zip((1, 2, 4, 5, 6), kept, strict=True):
        for result, expected in zip(results, _expected(number), strict=True):
            np.testing.assert_allclose(result.values[0], expected, rtol=1e-6)
    pieces = []
    for number in range(7, 12):  # as much memory as was ever in use at once is enough
        (total, _, _) = strategy.run(step, (_batch(number),))
        assert total.values[0] == pytest.approx(_expected(number)[0])
        pieces.append(len(gpu.pieces))
    assert pieces == pieces[:1] * 5


def test_losses_are_added_up_when_somebody_asks() -> None:
    strategy = ar.MirroredStrategy(["GPU:0"])

    @ar.function
    def step(x: Any) -> Any:
        return {"loss": ar.ops.sum(x, axis=1)}

    strategy.run(step, (_batch(0),))
    back = far.device("GPU:0").own("device-to-host")
    back.synchronize()
    back.gate.clear()
    totals = Totals(strategy, {})
    for number in (1, 2, np.nan, 4):
        totals.add(strategy.run(step, (ar.PerReplica((np.full((3, 4), number, np.float32),)),)))
        assert totals.first_nan == -1  # nothing is there to be read
    back.gate.set()
    assert np.isnan(totals.local_means()["loss"])
    assert (totals.first_nan, totals.rows) == (2, 12)
    many = Totals(strategy, {})
    for number in range(1, 41):
        many.add(strategy.run(step, (ar.PerReplica((_batch(number),)),)))
    assert many.means() == {"loss": 4 * 20.5}


def test_what_a_function_returns_is_waited_for_by_its_reader() -> None:
    strategy, _ = _counting()
    double = ar.function(lambda x: x * 2.0)
    with strategy.scope():
        double(np.ones(3, np.float32))
        back = far.device("GPU:0").own("device-to-host")
        back.synchronize()
        copied = back.done
        back.gate.clear()
        found = double(np.ones(3, np.float32))
        assert (found.shape, back.done) == ((3,), copied)
        back.gate.set()
        np.testing.assert_array_equal(found.numpy(), [2.0, 2.0, 2.0])
        assert float(double(np.ones((), np.float32))) == 2.0


def test_a_batch_that_was_brought_before_is_not_copied_again() -> None:
    strategy, step = _counting()
    stream = far.device("GPU:0").own("host-to-device")
    for number, (x,) in enumerate(strategy.distribute_dataset([(_batch(i),) for i in range(5)])):
        before = stream.done
        loss, _, _ = strategy.run(step, (x,))
        del x  # the step may still read it
        assert loss.values[0] == pytest.approx(_expected(number)[0])
        assert stream.done - before <= 1, "the next one"
    assert stream.done == 5


def test_programs_show_the_streams_and_need_all_their_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy, step = _counting()
    programs = programs_of(monkeypatch, lambda: strategy.run(step, (_batch(1),)))
    (program,) = programs
    streams = {each.node.op: str(each.stream) for each in program.instructions}
    assert streams["feed"] == "GPU:0 host-to-device"
    assert streams["fetch"] == "GPU:0 device-to-host"
    assert [each.node.op for each in program.instructions].count("fetch") == 3
    assert check_events(programs) == 4  # of what is fed, and of what is fetched
    monkeypatch.undo()
    far.install(monkeypatch)
    strategy.run(step, (_batch(1),))
    ar.observe.explain(strategy, step)
    said = capsys.readouterr().out
    assert "host -> GPU:0: float32(3, 4), 48 B of argument 0\n" in said
    assert said.count("GPU:0 -> host: float32(4,), 16 B of what it returns\n") == 1


def test_a_step_leaves_alone_what_the_one_before_still_uses() -> None:
    strategy = ar.MirroredStrategy(["GPU:0", "GPU:1"], devices_per_replica=2)

    @ar.function
    def step(x: Any) -> Any:
        with ar.device("GPU:0"):
            here = ar.ops.exp(x)
        with ar.device("GPU:1"):
            return ar.ops.log(here) + 1.0

    strategy.run(step, (_batch(0),))
    across = far.device("GPU:0").own("device-to-device")
    across.gate.clear()
    found = [strategy.run(step, (_batch(number),)) for number in range(1, 4)]
    across.gate.set()
    for number, each in enumerate(found, 1):
        np.testing.assert_allclose(each.values[0], np.full((3, 4), number + 1.0), rtol=1e-6)


def test_a_collective_leaves_alone_what_the_step_before_still_reads() -> None:
    names = ["GPU:0", "GPU:1"]
    strategy = ar.MirroredStrategy(names)
    step = ar.function(lambda x: ar.ops.exp(ar.ops.all_gather(x)) + 1.0)

    def run(number: int) -> Any:
        return strategy.run(step, (ar.PerReplica((_batch(number),) * 2, rows_per_replica=(3, 3)),))

    run(0)
    gates = [far.device(name).own("compute").gate for name in names]
    for gate in gates:
        gate.clear()
    openings = [threading.Timer(0.05, gate.set) for gate in gates]
    for opening in openings:
        opening.start()
    found = [run(number) for number in range(1, 4)]
    for opening in openings:
        opening.join()
    for number, each in enumerate(found, 1):
        for value in each.values:
            np.testing.assert_allclose(value, np.full((6, 4), np.exp(number) + 1), rtol=1e-6)


def test_a_functions_memory_stays_while_a_device_is_at_it() -> None:
    gpu = far.device("GPU:0")
    power = ar.function(lambda x: ar.ops.matmul(ar.ops.matmul(x, x), x))
    x = np.eye(4, dtype=np.float32) * 2
    gpu.own("compute").gate.clear()
    found = ar.MirroredStrategy(["GPU:0"]).run(power, (x,))
    del power
    gc.collect()
    others = [gpu.allocate(x.nbytes).array(np.float32, (16,)) for _ in range(4)]
    gpu.own("compute").gate.set()
    np.testing.assert_array_equal(found.values[0], x**3)
    assert not np.any(others)


def test_draws_are_those_of_the_step_that_was_issued() -> None:
    dropout = ar.nn.Dropout(0.5)
    step = ar.function(lambda x: dropout(x, training=True))

    def run(device: str, ahead: bool) -> list[np.ndarray]:
        ar.set_seed(5)
        strategy = ar.MirroredStrategy([device])
        strategy.run(step, (_batch(1),))
        if ahead:
            far.device(device).own("compute").gate.clear()
        found = [strategy.run(step, (_batch(1),)) for _ in range(4)]
        if ahead:
            far.device(device).own("compute").gate.set()
        return [each.values[0] for each in found]

    np.testing.assert_array_equal(run("GPU:0", ahead=True), run("CPU:0", ahead=False))


def test_devices_and_the_host_have_parts_of_one_step() -> None:
    strategy = ar.MirroredStrategy(["GPU:0"])
    with strategy.scope(), ar.device("CPU:0"):
        seen = ar.Variable(np.zeros(4, np.float32))

    @ar.function
    def step(x: Any) -> Any:
        with ar.device("GPU:0"):
            there = ar.ops.exp(x)
        with ar.device("CPU:0"):
            here = ar.ops.log(there) + 1.0
            seen.assign(seen + ar.ops.sum(here, axis=0))
        with ar.device("GPU:0"):
            return ar.ops.exp(here), here

    @ar.function
    def count() -> Any:
        with ar.device("CPU:0"):  # which waits for nothing on the device
            seen.assign(seen + 1.0)
            now = seen * 1.0
        with ar.device("GPU:0"):
            return now + 1.0

    for number in range(6):
        back, here = strategy.run(step, (_batch(number % 3),))
        np.testing.assert_allclose(here.values[0], _batch(number % 3) + 1, rtol=1e-6)
        np.testing.assert_allclose(back.values[0], np.exp(_batch(number % 3) + 1), rtol=1e-5)
    np.testing.assert_allclose(seen.numpy(), np.full(4, 36.0), rtol=1e-6)
    strategy.run(count)
    there = far.device("GPU:0").own("host-to-device")
    there.gate.clear()
    opening = threading.Timer(0.05, there.gate.set)
    opening.start()
    found = [strategy.run(count) for _ in range(3)]
    opening.join()
    for number, each in enumerate(found, 39):
        np.testing.assert_allclose(each.values[0], np.full(4, number), rtol=1e-6)


def test_an_update_looks_at_the_number_of_samples_of_its_own_step() -> None:
    strategy = ar.MirroredStrategy(["GPU:0"])
    with strategy.scope():
        w = ar.Variable(np.ones(4, np.float32))
        optimizer = ar.optim.SGD(0.1)

    @ar.function
    def step(x: Any, weight: Any) -> None:
        optimizer.minimize(ar.ops.sum(x * w), [w], weight=ar.ops.sum(weight))

    for weight in (1.0, 2.0):
        strategy.run(step, (_batch(1), np.float32(weight)))
    with pytest.raises(ar.NumericsError, match="weights of all replicas add up to inf"):
        strategy.run(step, (_batch(1), np.float32(np.inf)))
    assert np.isfinite(w.numpy()).all()
