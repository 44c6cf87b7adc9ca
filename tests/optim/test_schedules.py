"""Learning-rate schedules: their formulas, and that updates follow them."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import optim
from allreduce.errors import UsageError
from allreduce.graph import Variable, function
from allreduce.optim import schedules
from tests.harness import run_ranks

COSINE = 0.5 * (1 + math.cos(math.pi * 0.25))


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        (schedules.ExponentialDecay(0.1, 10, 0.5), 5, 0.1 * 0.5**0.5),
        (schedules.ExponentialDecay(0.1, 10, 0.5, staircase=True), 19, 0.05),
        (schedules.InverseTimeDecay(0.1, 10, 2.0), 5, 0.05),
        (schedules.InverseTimeDecay(0.1, 10, 2.0, staircase=True), 9, 0.1),
        (schedules.PolynomialDecay(0.1, 10, 0.02, power=2.0), 5, 0.08 / 4 + 0.02),
        (schedules.PolynomialDecay(0.1, 10, 0.02), 50, 0.02),
        (schedules.PolynomialDecay(0.1, 10, 0.02, cycle=True), 15, 0.08 / 4 + 0.02),
        (schedules.PiecewiseConstantDecay([10, 20], [3, 2, 1]), 10, 3),
        (schedules.PiecewiseConstantDecay([10, 20], [3, 2, 1]), 11, 2),
        (schedules.PiecewiseConstantDecay([10, 20], [3, 2, 1]), 99, 1),
        (schedules.CosineDecay(0.1, 100), 25, 0.1 * COSINE),
        (schedules.CosineDecay(0.1, 100, alpha=0.1), 25, 0.1 * (0.9 * COSINE + 0.1)),
        (schedules.CosineDecay(0.1, 100, alpha=0.1), 500, 0.01),
        (schedules.CosineDecay(0.0, 100, warmup_target=0.4, warmup_steps=10), 5, 0.2),
        (schedules.CosineDecay(0.0, 100, warmup_target=0.4, warmup_steps=10), 35, 0.4 * COSINE),
        (schedules.CosineDecayRestarts(0.1, 100), 25, 0.1 * COSINE),
        (schedules.CosineDecayRestarts(0.1, 100, m_mul=0.5), 150, 0.05 * COSINE),
        (schedules.CosineDecayRestarts(0.1, 100, t_mul=1.0, m_mul=0.5), 225, 0.025 * COSINE),
        (schedules.CosineDecayRestarts(0.1, 100, alpha=0.1), 100, 0.1),
        (schedules.OneCycle(0.5, 100), 0, 0.02),
        (schedules.OneCycle(0.5, 100), 29, 0.5),
        (schedules.OneCycle(0.5, 100), 99, 0.02 / 1e4),
        (schedules.OneCycle(0.1, 10, 0.1), 0, 0.1),
        (schedules.Warmup(0.1, 10), 5, 0.05),
        (schedules.Warmup(schedules.ExponentialDecay(0.1, 10, 0.5), 10, 0.02), 5, 0.06),
        (schedules.Warmup(schedules.ExponentialDecay(0.1, 10, 0.5), 10), 20, 0.05),
        (schedules.LinearScaling(0.1, 8), 0, 0.8),
        (schedules.LinearScaling(0.1, 8, warmup_steps=10), 0, 0.1),
        (schedules.LinearScaling(schedules.CosineDecay(0.1, 100), 8, 10), 25, 0.8 * COSINE),
    ],
)
def test_a_schedule_follows_its_formula(
    schedule: schedules.Schedule, step: int, rate: float
) -> None:
    assert schedule(step) == pytest.approx(rate)
    again = schedules.get(schedules.describe(schedule, step))
    assert callable(again)
    assert [again(each) for each in range(200)] == [schedule(each) for each in range(200)]


@pytest.mark.parametrize("kind", [schedules.ExponentialDecay, schedules.InverseTimeDecay])
def test_a_missing_argument_is_that_of_the_schedule_itself(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__}.__init__\(\) missing .* 'decay_rate'"):
        kind(0.1, 100)


def test_one_cycle_is_that_of_pytorch() -> None:
    torch: Any = pytest.importorskip("torch")
    peer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(peer, max_lr=0.5, total_steps=50)
    ours = schedules.OneCycle(0.5, 50)
    for step in range(49):
        assert ours(step) == pytest.approx(peer.param_groups[0]["lr"])
        peer.step()
        theirs.step()


def _train(rate: Any, steps: int, optimizer: type[Any] = optim.SGD) -> list[float]:
    """Give the changes of a variable whose gradient is 1, one for each step."""
    variable, made, seen = Variable(np.zeros(3), name="p"), optimizer(rate), [0.0]
    traces = []

    @function
    def step() -> None:
        traces.append(1)
        made.minimize(ar.ops.sum(ar.ops.multiply(variable, 1.0)), [variable])

    for _ in range(steps):
        step()
        seen.append(float(variable.numpy()[0]))
    assert len(traces) == 1, "a schedule must not trace steps again"
    return [before - after for before, after in itertools.pairwise(seen)]


@pytest.mark.parametrize(
    "rate", [schedules.ExponentialDecay(0.8, 1, 0.5), lambda step: 0.8 * 0.5**step]
)
def test_updates_follow_a_schedule_without_new_traces(rate: Any) -> None:
    assert _train(rate, 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])


def test_adam_follows_a_schedule() -> None:
    changes = _train(schedules.PiecewiseConstantDecay([0, 1], [0.1, 0.0, 0.2]), 3, optim.Adam)
    assert changes == pytest.approx([0.1, 0.0, 0.2], rel=1e-4)


def test_the_rate_now_can_be_read_and_replaced() -> None:
    optimizer = optim.SGD(schedules.ExponentialDecay(0.8, 1, 0.5))
    assert optimizer.learning_rate == 0.8
    optimizer.iterations = 2
    assert optimizer.learning_rate == 0.2
    optimizer.learning_rate = 0.1
    assert optimizer.learning_rate == 0.1
    assert optimizer.get_config()["learning_rate"] == 0.1


class Halving(schedules.Schedule):
    """One's own."""

    def __init__(self, first: float) -> None:
        self.first = first

    def __call__(self, step: int) -> float:
        return float(self.first / 2**step)


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.Warmup(0.1, 3),
        Halving(0.4),
        schedules.LinearScaling(schedules.Warmup(Halving(0.4), 3), 2),
    ],
)
def test_a_schedule_is_saved_with_its_optimizer(
    schedule: schedules.Schedule, tmp_path: Path
) -> None:
    model = ar.nn.Sequential([ar.nn.Dense(1)])
    model.compile(optimizer=optim.SGD(schedule), loss="mse")
    x = np.ones((8, 2), np.float32)
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
    model.save(tmp_path / "model.safetensors")
    again = ar.nn.load_model(tmp_path / "model.safetensors", custom_objects={"Halving": Halving})
    assert again.optimizer.iterations == 2
    assert again.optimizer.learning_rate == schedule(2)


def test_a_function_cannot_be_saved_and_bad_rates_name_the_update() -> None:
    with pytest.raises(UsageError, match=r"cannot be saved: its learning rate is the function"):
        optim.serialize(optim.SGD(lambda step: 0.1))
    around = schedules.LinearScaling(schedules.Warmup(lambda step: 0.1, 3), 2)
    with pytest.raises(UsageError, match=r"cannot be saved: its learning rate is the function .*<"):
        optim.serialize(optim.SGD(around))
    with pytest.raises(UsageError, match=r"the learning rate of update 3 is nan, as .*\(2\)"):
        _train(lambda step: 0.1 if step < 2 else math.nan, 3)
    with pytest.raises(UsageError, match=r"update 1 is -0.1"):
        _train(lambda step: -0.1, 1)
    with pytest.raises(UsageError, match=r"update 2 is nan, as Warmup\(1\)"):
        _train(schedules.Warmup(lambda step: 0.1 if step < 1 else math.nan, 0), 2)
    with pytest.raises(IndexError) as caught:
        _train(schedules.Warmup(lambda step: [0.1, 0.2][step], 1), 5)
    assert caught.value.__notes__ == ["Warmup(3), the learning rate of update 4, raised it"]
    with pytest.raises(UsageError, match=r"make a schedule: Warmup"):
        optim.SGD(schedules.Warmup)
    with pytest.raises(UsageError, match=r"increasing boundaries and one more value"):
        schedules.PiecewiseConstantDecay([2, 1], [1, 2, 3])
    with pytest.raises(UsageError, match=r"decay_steps is a finite number > 0, not 0"):
        schedules.CosineDecay(0.1, 0)


def _ranks_with_schedules() -> None:
    import numpy as np
    import pytest

    import allreduce as ar
    from allreduce import optim
    from allreduce.optim import schedules

    comm = ar.init()
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(1)])
        model.compile(optimizer=optim.SGD(schedules.ExponentialDecay(0.5, 1, 0.5)), loss="mse")
    x = np.linspace(0, 1, 24, dtype=np.float32).reshape(8, 3)
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    assert model.optimizer.learning_rate == 0.5 * 0.5**4
    model.optimizer.learning_rate = schedules.Warmup(0.1, 4 + comm.rank)
    with pytest.raises(ar.MismatchError, match="warmup_steps"):
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)


def _ranks_with_bad_rates(eagerly: bool) -> None:
    import math

    import numpy as np
    import pytest

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(1)])
        model.compile(optimizer=ar.optim.SGD(0.1), loss="mse", run_eagerly=eagerly)
    x = np.linspace(0, 1, 48, dtype=np.float32).reshape(16, 3)
    note = ar.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)

    def fit() -> None:
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=[note])

    model.optimizer.learning_rate = lambda step: 0.1 if step < 2 else math.nan
    with pytest.raises(ar.UsageError, match="the learning rate of update 3 is nan"):
        fit()
    model.optimizer.learning_rate = [0.1, 0.1, 0.1].__getitem__
    with pytest.raises(IndexError) as caught:
        fit()
    assert "the learning rate of update 4, raised it" in caught.value.__notes__[0]
    # A schedule is not asked for a rate after the last update.
    model.optimizer.learning_rate = ([0.1] * 7).__getitem__
    fit()
    assert model.optimizer.iterations == 7
    model.optimizer.learning_rate = 0.1
    fit()
    assert model.optimizer.iterations == 11


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_training_goes_on_after_a_schedule_has_failed(size: int, eagerly: bool) -> None:
    for result in run_ranks(_ranks_with_bad_rates, size, arguments=[eagerly]):
        assert result.returncode == 0, result.stderr


def test_ranks_follow_a_schedule_and_compare_it() -> None:
    for result in run_ranks(_ranks_with_schedules, 2):
        assert result.returncode == 0, result.stderr


def test_the_page_has_every_schedule_with_its_arguments() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "nn.md").read_text()
    for name, kind in schedules._TABLE.items():
        (row,) = (line for line in page.splitlines() if re.match(rf"\|[^|]*`{name}`", line))
        for argument in inspect.signature(kind).parameters.values():
            assert re.search(rf"\b{argument.name}\b", row), (name, argument.name)
            written = re.search(rf"\b{argument.name}=([^,| ]+)", row)
            assert written is None or eval(written[1]) == argument.default
