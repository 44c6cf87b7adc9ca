"""Optimizers beside their formulas over 20 steps; clipping, averages of weights, groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

import allreduce as ar
from allreduce import nn, optim
from allreduce.errors import UnsupportedError, UsageError
from allreduce.optim.registry import TABLE
from tests.harness import run_ranks

STEPS = 20
SHAPES = ((3, 4), (4,), (40, 5))
RNG = np.random.default_rng(7)
START = [RNG.normal(size=shape).astype(np.float32) for shape in SHAPES]
GRADIENTS = [[RNG.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(STEPS)]

Formula = Callable[[np.ndarray, np.ndarray, dict[str, np.ndarray], int], np.ndarray]


def _sgd(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> Any:
    del t
    s["v"] = 0.9 * s["v"] - 0.01 * g
    return p + 0.9 * s["v"] - 0.01 * g


def _adam(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> Any:
    s["m"] = 0.9 * s["m"] + 0.1 * g
    s["v"] = 0.999 * s["v"] + 0.001 * g**2
    rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return p - rate * s["m"] / (np.sqrt(s["v"]) + 1e-7)


def _adamw(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> Any:
    s["m"] = 0.9 * s["m"] + 0.1 * g
    s["v"] = 0.99 * s["v"] + 0.01 * g**2
    mean, square = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.99**t)
    return p * (1 - 0.01 * 0.1) - 0.01 * mean / (np.sqrt(square) + 1e-10)


def _rmsprop(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> Any:
    del t
    s["v"] = 0.8 * s["v"] + 0.2 * g**2
    s["mean"] = 0.8 * s["mean"] + 0.2 * g
    s["u"] = 0.5 * s["u"] + 0.01 * g / np.sqrt(s["v"] - s["mean"] ** 2 + 1e-4)
    return p - s["u"]


def _adagrad(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> Any:
    del t
    s["a"] = s["a"] + g**2
    return p - 0.01 * g / np.sqrt(s["a"] + 0.1 + 1e-7)


def _lion(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> Any:
    del t
    move = np.sign(0.9 * s["m"] + 0.1 * g) + 0.2 * p
    s["m"] = 0.99 * s["m"] + 0.01 * g
    return p - 0.01 * move


def _lars(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> Any:
    del t
    weights, size = np.linalg.norm(p), np.linalg.norm(g)
    s["v"] = 0.9 * s["v"] + 0.1 * 0.02 * weights / (size + 0.3 * weights) * (g + 0.3 * p)
    return p - s["v"]


def _lamb(p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray], t: int) -> Any:
    s["m"] = 0.9 * s["m"] + 0.1 * g
    s["v"] = 0.999 * s["v"] + 0.001 * g**2
    move = s["m"] / (1 - 0.9**t) / (np.sqrt(s["v"] / (1 - 0.999**t)) + 1e-6) + 0.1 * p
    return p - 0.01 * np.linalg.norm(p) / np.linalg.norm(move) * move


CASES: dict[str, tuple[Callable[..., Any], Formula]] = {
    "SGD": (lambda **o: optim.SGD(0.01, 0.9, True, **o), _sgd),
    "Adam": (lambda **o: optim.Adam(0.01, **o), _adam),
    "AdamW": (lambda **o: optim.AdamW(0.01, 0.1, 0.9, 0.99, 1e-10, **o), _adamw),
    "RMSprop": (lambda **o: optim.RMSprop(0.01, 0.8, 0.5, 1e-4, True, **o), _rmsprop),
    "Adagrad": (lambda **o: optim.Adagrad(0.01, **o), _adagrad),
    "Lion": (lambda **o: optim.Lion(0.01, weight_decay=0.2, **o), _lion),
    "LARS": (lambda **o: optim.LARS(0.1, 0.9, 0.3, 0.02, **o), _lars),
    "Lamb": (lambda **o: optim.Lamb(0.01, epsilon=1e-6, weight_decay=0.1, **o), _lamb),
}


def stepped(
    optimizer: Any, gradients: list[list[np.ndarray]], replicas: int = 1
) -> list[np.ndarray]:
    """Apply gradients, the same on every replica, to variables that start as START."""
    ar.config.set_logical_devices("CPU", 4)
    strategy = MirroredStrategy([f"CPU:{place}" for place in range(replicas)])
    with strategy.scope():
        variables = [ar.Variable(value, name=f"v{i}") for i, value in enumerate(START)]

    @ar.function
    def step(*values: Any) -> Any:
        optimizer.apply(list(values), variables)

    for each in gradients:
        strategy.run(step, tuple(each))
    return [variable.numpy() for variable in variables]


def by_formula(formula: Formula, gradients: list[list[np.ndarray]]) -> list[np.ndarray]:
    found = []
    for place, start in enumerate(START):
        value = start.astype(np.float64)
        slots = {name: np.zeros_like(value) for name in ("m", "v", "mean", "u", "a")}
        for number, each in enumerate(gradients, 1):
            value = formula(value, each[place].astype(np.float64), slots, number)
        found.append(value)
    return found


def test_every_optimizer_has_a_formula() -> None:
    assert {name.lower() for name in CASES} == set(TABLE)


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_those_of_the_formula(name: str) -> None:
    make, formula = CASES[name]
    wanted = by_formula(formula, GRADIENTS)
    for replicas in (1, 2):
        for found, value in zip(stepped(make(), GRADIENTS, replicas), wanted, strict=True):
            np.testing.assert_allclose(found, value, rtol=2e-4, atol=2e-5)
    again = optim.deserialize(optim.serialize(make()), {})
    assert again.get_config() == make().get_config()
    assert isinstance(optim.get(name.lower()), type(make()))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_twenty_steps_are_pytorchs(name: str) -> None:
    torch: Any = pytest.importorskip("torch", reason="needs torch: pip install torch")
    makers: dict[str, tuple[Any, Any]] = {
        "SGD": (optim.SGD(0.01, 0.9), {"lr": 0.01, "momentum": 0.9}),
        "Adam": (optim.Adam(0.01, epsilon=1e-12), {"lr": 0.01, "eps": 1e-12}),
        "AdamW": (optim.AdamW(0.01, 0.1, epsilon=1e-8), {"lr": 0.01, "weight_decay": 0.1}),
        "RMSprop": (
            optim.RMSprop(0.01, 0.9, epsilon=1e-12),
            {"lr": 0.01, "alpha": 0.9, "eps": 1e-12},
        ),
        "Adagrad": (
            optim.Adagrad(0.01, epsilon=1e-12),
            {"lr": 0.01, "initial_accumulator_value": 0.1, "eps": 1e-12},
        ),
    }
    own, options = makers[name]
    tensors = [torch.tensor(value, requires_grad=True) for value in START]
    theirs = getattr(torch.optim, name)(tensors, **options)
    for each in GRADIENTS:
        for tensor, gradient in zip(tensors, each, strict=True):
            tensor.grad = torch.tensor(gradient)
        theirs.step()
    for found, tensor in zip(stepped(own, GRADIENTS), tensors, strict=True):
        np.testing.assert_allclose(found, tensor.detach().numpy(), rtol=1e-4, atol=1e-6)


def _clipped(limit: float) -> list[list[np.ndarray]]:
    found = []
    for each in GRADIENTS:
        norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in each))
        found.append([g * min(1.0, limit / norm) for g in each])
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("buckets", [None, 64])
def test_the_norm_of_all_gradients_is_clipped(replicas: int, buckets: int | None) -> None:
    ar.config.set_buckets(buckets)
    try:
        norms = [np.sqrt(sum(float((g**2).sum()) for g in each)) for each in GRADIENTS]
        limit = float(np.median(norms))  # half of the steps are clipped
        found = stepped(optim.SGD(0.1, clip_norm=limit), GRADIENTS, replicas)
        for value, wanted in zip(found, stepped(optim.SGD(0.1), _clipped(limit)), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    finally:
        ar.config.set_buckets(None)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_norm_whose_square_overflows_is_clipped(replicas: int) -> None:
    huge = [np.float32(1e20) * each for each in GRADIENTS[0]]  # float32 ends at 3.4e38
    norm = np.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in huge))
    found = stepped(optim.SGD(1.0, clip_norm=0.5), [huge], replicas)
    expected = stepped(optim.SGD(1.0), [[np.float32(0.5 / norm) * each for each in huge]])
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_each_element_is_clipped_after_the_mean() -> None:
    found = stepped(optim.SGD(0.1, clip_value=0.3), GRADIENTS, 2)
    clipped = [[np.clip(g, -0.3, 0.3) for g in each] for each in GRADIENTS]
    for value, wanted in zip(found, stepped(optim.SGD(0.1), clipped), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("size", [4, 1 << 18])  # updated as a whole, and in slices
@pytest.mark.parametrize("option", ["clip_norm", "clip_value"])
def test_limits_may_change_between_steps(option: str, size: int, replicas: int) -> None:
    optimizer = optim.SGD(1.0, 0.5, **{option: 0.5})  # type: ignore[arg-type]
    variable, run = _ones(optimizer, size, replicas)
    run()
    setattr(optimizer, option, 0.25)
    run()
    each = 0.5 if option == "clip_value" else 0.5 / np.sqrt(size)
    np.testing.assert_allclose(variable.numpy(), np.full(size, -(1 + 0.5 + 0.5) * each), rtol=1e-4)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("option", "before", "after"),
    [
        ("clip_norm", None, 0.5),
        ("clip_norm", 0.5, None),
        ("clip_value", None, 0.5),
        ("ema_momentum", None, 0.5),
        ("groups", lambda _: {}, lambda _: {"momentum": 0.0}),
    ],
)
def test_options_cannot_be_turned_on_or_off_after_the_first_step(
    option: str, before: Any, after: Any, replicas: int
) -> None:
    optimizer = optim.SGD(1.0, 0.5, **{option: before})
    variable, run = _ones(optimizer, 1 << 18, replicas)
    run()
    first = variable.numpy()
    setattr(optimizer, option, after)
    with pytest.raises(UsageError, match=rf"SGD.{option} was set to .* after its first step"):
        run()
    np.testing.assert_array_equal(variable.numpy(), first)
    setattr(optimizer, option, before)
    run()  # it goes on
    assert (variable.numpy() < first).all()


def _ones(optimizer: Any, size: int, replicas: int) -> tuple[ar.Variable, Callable[[], None]]:
    """Make a variable of zeros, and a step whose gradient is 1 for each element."""
    ar.config.set_logical_devices("CPU", 4)
    strategy = MirroredStrategy([f"CPU:{place}" for place in range(replicas)])
    with strategy.scope():
        variable = ar.Variable(np.zeros(size, np.float32), name="v")

    @ar.function
    def step() -> None:
        optimizer.apply([np.ones(size, np.float32)], [variable])

    return variable, lambda: strategy.run(step)


def test_groups_have_hyperparameters_of_their_own() -> None:
    def groups(path: str) -> dict[str, float]:
        return {"weight_decay": 0.0, "learning_rate_factor": 0.5} if path == "v1" else {}

    found = stepped(optim.AdamW(0.01, 0.1, groups=groups), GRADIENTS)
    usual = stepped(optim.AdamW(0.01, 0.1), GRADIENTS)
    other = stepped(optim.AdamW(0.005, 0.0), GRADIENTS)
    for place, wanted in enumerate((usual[0], other[1], usual[2])):
        np.testing.assert_array_equal(found[place], wanted)
    with pytest.raises(UsageError, match="groups of SGD: unknown hyperparameter 'weight_decay'"):
        stepped(optim.SGD(0.01, groups=groups), GRADIENTS)


class Mine(optim.Adam):
    """One's own, with a helper and a call of the base class's update."""

    def update(self, *arguments: Any) -> None:
        arguments[1][...] *= self.factor()
        super().update(*arguments)

    def factor(self) -> float:
        return 2.0 if self.beta_1 == 0.9 else 1.0


def test_groups_of_an_optimizer_of_ones_own() -> None:
    made = Mine(0.01, groups=lambda path: {"beta_1": 0.5} if path == "v1" else {})
    found = stepped(made, GRADIENTS)
    doubled = [[each[0] * 2, each[1], each[2] * 2] for each in GRADIENTS]
    usual, other = stepped(optim.Adam(0.01), doubled), stepped(optim.Adam(0.01, 0.5), doubled)
    for place, wanted in enumerate((usual[0], other[1], usual[2])):
        np.testing.assert_array_equal(found[place], wanted)


def test_groups_follow_later_changes_of_the_optimizer() -> None:
    made = optim.SGD(0.1, 0.9, groups=lambda _: {"learning_rate_factor": 0.5})
    variable = ar.Variable(np.zeros(1, np.float32), name="v")

    @ar.function
    def step() -> None:
        made.apply([np.ones(1, np.float32)], [variable])

    step()
    made.learning_rate, made.momentum = 1.0, 0.0
    step()
    assert variable.numpy()[0] == pytest.approx(-0.05 - 0.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"weight_decay": -0.1},
            r"weight_decay in groups\('v0'\) of AdamW .* not -0.1",
        ),
        ({"beta_1": float("nan")}, r"beta_1 in groups\('v0'\) of AdamW is a finite .* not nan"),
        (
            {"learning_rate_factor": -1},
            r"learning_rate_factor in groups\('v0'\) of AdamW .* not -1",
        ),
        (0.1, r"groups\('v0'\) of AdamW is a dict or None, not 0.1"),
    ],
)
def test_values_of_groups_are_checked(changed: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stepped(optim.AdamW(groups=lambda _: changed), GRADIENTS)


def no_decay(path: str) -> dict[str, float]:
    return {"weight_decay": 0.0} if path.endswith("bias") else {}


def test_groups_are_saved_by_their_name(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((3,)), nn.Dense(2)])
    model.compile(optim.AdamW(groups=no_decay), "mse")
    model.save(tmp_path / "model")
    again = nn.load_model(tmp_path / "model", custom_objects={"no_decay": no_decay})
    assert again.optimizer.groups is no_decay
    with pytest.raises(UsageError, match="groups of AdamW are the function 'no_decay'; pass it as"):
        nn.load_model(tmp_path / "model")


def test_weights_have_a_moving_average_to_evaluate_with(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((3,)), nn.Dense(2)])
    model.compile(optim.SGD(0.1, ema_momentum=0.9), "mse")
    x, y = RNG.normal(size=(64, 3)), RNG.normal(size=(64, 2))
    average: Any = None
    for _ in range(3):
        model.fit(x, y, batch_size=64, verbose=0)
        values = model.get_weights()
        if average is None:
            average = values
        average = [0.9 * a + 0.1 * v for a, v in zip(average, values, strict=True)]
    optimizer: Any = model.optimizer
    with optimizer.averaged(model.trainable_variables):
        for found, wanted in zip(model.get_weights(), average, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for found, wanted in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(found, wanted)
    model.save(tmp_path / "model")
    again = nn.load_model(tmp_path / "model").optimizer
    key = f"{model.trainable_variables[0].name}/weights_average"
    np.testing.assert_array_equal(optimizer.state()[key], again.state()[key])
    with pytest.raises(UsageError, match="keeps no average"), optim.SGD().averaged([]):
        pass


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_state_without_averages_begins_them_with_the_weights(replicas: int) -> None:
    ar.config.set_logical_devices("CPU", 4)
    strategy = MirroredStrategy([f"CPU:{place}" for place in range(replicas)])
    before, after = optim.Adam(0.0), optim.Adam(0.0, ema_momentum=0.9)
    with strategy.scope():
        variable = ar.Variable(np.full(100_000, 3, np.float32), name="v")
    gradient = np.ones(100_000, np.float32)

    for optimizer, state in ((before, None), (after, before)):

        @ar.function
        def step(value: Any, optimizer: Any = optimizer) -> Any:
            optimizer.apply([value], [variable])

        if state is not None:
            optimizer.load_state(state.state())
        strategy.run(step, (gradient,))
    with after.averaged([variable]):
        np.testing.assert_allclose(variable.numpy(), 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optim.Adam(clipnorm=1.0), "takes no clipnorm=: clip_norm= limits"),  # type: ignore[call-arg]
        (lambda: optim.Adam(global_clipnorm=1.0), "called clip_norm="),  # type: ignore[call-arg]
        (lambda: optim.SGD(clipvalue=1.0), "called clip_value="),  # type: ignore[call-arg]
        (lambda: optim.Adam(weight_decay=0.1), "weight_decay=: AdamW, LAMB, LARS and Lion"),  # type: ignore[call-arg]
        (lambda: optim.SGD(lr=0.1), "takes no lr=: the argument is called learning_rate="),  # type: ignore[call-arg]
        (lambda: optim.SGD(use_ema=True), "ema_momentum= alone"),  # type: ignore[call-arg]
        (lambda: optim.SGD(clip_norm=0.0), "clip_norm is a finite number > 0"),
        (lambda: optim.SGD(ema_momentum=1.0), "ema_momentum is a finite number"),
        (lambda: optim.SGD(groups={}), "groups is a function"),  # type: ignore[arg-type]
        (lambda: optim.SGD(clip_nrm=1.0), "did you mean 'clip_norm'"),  # type: ignore[call-arg]
        (lambda: optim.get("nadam"), r"there are adagrad[^;]*$"),
        (lambda: optim.serialize(optim.SGD(groups=lambda _: {})), "as a function with a name"),
    ],
)
def test_options_that_make_no_sense_are_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_a_norm_needs_all_variables_in_one_arena() -> None:
    variables = [ar.Variable(np.ones(3, kind), name=kind) for kind in ("float32", "float64")]
    optimizer = optim.SGD(clip_norm=1.0)

    @ar.function
    def step() -> None:
        optimizer.apply([np.ones(3, "float32"), np.ones(3)], variables)

    with pytest.raises(UnsupportedError, match="clip_norm needs all variables in one arena"):
        step()


_PROGRAM = """
import json
import numpy as np
import allreduce as ar
from allreduce import nn, optim
from tests.optim.test_optimizers import CASES, trained

strategy = ar.MultiWorkerMirroredStrategy()
found = {name: trained(make(clip_norm=0.5), strategy) for name, (make, _) in CASES.items()}
if strategy.communicator is None or strategy.communicator.rank == 0:
    print(json.dumps(found))
"""


def trained(optimizer: Any, strategy: Any) -> list[float]:
    """Train a small network on 90 rows in batches of 40 and give its losses."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(90, 6)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(6, 2))).astype(np.float32)
    ar.set_seed(4)
    with strategy.scope():
        model = nn.Sequential([nn.Dense(8, activation="tanh"), nn.Dense(2)])
        model.compile(optimizer, "mse")
    history = model.fit(x, y, batch_size=40, epochs=4, verbose=0)
    losses: list[float] = history.history["loss"]
    return losses


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [pytest.param(2, "shared", marks=pytest.mark.torture), (4, "shared"), (3, "tcp")],
)
def test_any_number_of_ranks_trains_alike(ranks: int, transport: str) -> None:
    import json

    results = run_ranks(_PROGRAM, ranks, env={"ALLREDUCE_TRANSPORT": transport})
    (line,) = [line for each in results for line in each.stdout.splitlines() if line[:1] == "{"]
    found = json.loads(line)
    for name, (make, _) in CASES.items():
        alone = trained(make(clip_norm=0.5), MirroredStrategy(["CPU:0"]))
        assert found[name] == pytest.approx(alone, rel=1e-4), name
        assert alone[-1] < alone[0]
