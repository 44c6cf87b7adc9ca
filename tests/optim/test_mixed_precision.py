"""Mixed precision: products of bfloat16 operands, gradients exchanged as bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

import allreduce as ar
from allreduce import nn, optim
from allreduce.errors import UsageError
from tests.harness import run_ranks

pytest.importorskip("ml_dtypes", reason="needs ml_dtypes: pip install ml_dtypes")
RNG = np.random.default_rng(2)
IMAGES = RNG.normal(size=(60, 8, 8, 1)).astype(np.float32)
LABELS = (IMAGES.mean(axis=(1, 2, 3)) > 0).astype(int)


@pytest.fixture(autouse=True)
def _mixed() -> Iterator[None]:
    ar.config.set_logical_devices("CPU", 4)
    ar.config.set_mixed_precision("bfloat16")
    yield
    ar.config.set_mixed_precision(None)


def short(x: Any) -> np.ndarray:
    """Round to 8 significant bits, by the bits of float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("eagerly", [False, True])
def test_products_read_bfloat16_and_add_up_float32(eagerly: bool) -> None:
    a, b = (RNG.normal(size=(5, 5)).astype(np.float32) for _ in range(2))
    w = ar.Variable(b, name="w")

    @ar.function
    def step(x: Any) -> Any:
        y = x @ w
        (gradient,) = ar.gradients(ar.ops.sum(y * y), [w])
        return y, gradient, x + w

    ar.config.run_functions_eagerly(eagerly)
    y, gradient, total = map(np.asarray, step(a))
    ar.config.run_functions_eagerly(False)
    np.testing.assert_allclose(y, short(a) @ short(b), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, short(a).T @ short(2 * y), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(total, a + b)  # not a product
    assert y.dtype == gradient.dtype == w.dtype == np.float32
    wide = np.asarray(ar.ops.matmul(a.astype(np.float64), b.astype(np.float64)))
    np.testing.assert_array_equal(wide, a.astype(np.float64) @ b.astype(np.float64))


def trained(strategy: Any, optimizer: Any = None, units: int = 16) -> tuple[list[float], Any]:
    ar.set_seed(6)
    with strategy.scope():
        model = nn.Sequential(
            [
                nn.Conv2D(4, 3, activation="relu"),
                nn.Flatten(),
                nn.Dense(units, activation="relu"),
                nn.Dense(2),
            ]
        )
        loss = nn.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer or optim.Adam(0.01), loss)
    history = model.fit(IMAGES, LABELS, batch_size=20, epochs=8, verbose=0)
    losses: list[float] = history.history["loss"]
    return losses, model


def test_a_model_learns_with_variables_and_slots_of_float32() -> None:
    losses, model = trained(MirroredStrategy(["CPU:0"]))
    assert losses[-1] < 0.5 * losses[0]
    state = model.optimizer.state()
    assert {value.dtype.name for key, value in state.items() if "/" in key} == {"float32"}
    assert {value.dtype.name for value in model.get_weights()} == {"float32"}
    ar.config.set_mixed_precision(None)
    plain, _ = trained(MirroredStrategy(["CPU:0"]))
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_exchange_half_the_bytes(
    replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, _ = trained(MirroredStrategy(["CPU:0"]), units=1000)
    strategy = MirroredStrategy([f"CPU:{place}" for place in range(replicas)])
    losses, model = trained(strategy, optim.Adam(0.01, clip_norm=10.0), units=1000)
    assert losses == pytest.approx(alone, rel=0.1)
    ar.observe.explain(strategy, model.train_step)
    said = capsys.readouterr().out
    size = sum(value.size for value in model.get_weights())
    assert f"{2 * size / 2**10:.3g} KiB" in said.split("communication: ")[1]
    for storage in zip(*(each.storage for each in model.variables), strict=True):
        for value, first in zip(storage, model.get_weights(), strict=True):
            np.testing.assert_array_equal(value, first)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("limit", [None, 0.1])
def test_several_buckets_train_as_one(limit: float | None, replicas: int) -> None:
    found = []
    for size in (None, 1):
        ar.config.set_buckets(size)
        try:
            strategy = MirroredStrategy([f"CPU:{place}" for place in range(replicas)])
            _, model = trained(strategy, optim.SGD(0.5, clip_norm=limit))
        finally:
            ar.config.set_buckets(None)
        for variable in model.variables:
            for value in variable.storage[1:]:
                np.testing.assert_array_equal(value, variable.storage[0], err_msg=variable.name)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _ranks() -> None:
    """Train on several ranks, and print the losses."""
    import allreduce as ar
    from tests.optim.test_mixed_precision import trained

    ar.config.set_mixed_precision("bfloat16")
    losses, model = trained(ar.MultiWorkerMirroredStrategy())
    print(losses, [float(value.sum()) for value in model.get_weights()])


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [pytest.param(2, "shared", marks=pytest.mark.torture), (4, "shared"), (2, "tcp")],
)
def test_ranks_train_nearly_as_one(ranks: int, transport: str) -> None:
    results = run_ranks(_ranks, ranks, env={"ALLREDUCE_TRANSPORT": transport})
    said = {result.stdout.strip() for result in results}
    assert len(said) == 1  # the same variables on all
    losses = eval(said.pop().partition("]")[0] + "]")
    assert losses == pytest.approx(trained(MirroredStrategy(["CPU:0"]))[0], rel=0.1)


def _one_rank_shortens() -> None:
    """Train with mixed precision on rank 0 alone, and print the error."""
    import allreduce as ar
    from tests.optim.test_mixed_precision import trained

    strategy = ar.MultiWorkerMirroredStrategy()
    ar.config.set_mixed_precision("bfloat16" if strategy.communicator.rank == 0 else None)
    try:
        trained(strategy)
    except ar.MismatchError as error:
        print(error)


def test_mixed_precision_of_one_rank_is_named() -> None:
    for rank, result in enumerate(run_ranks(_one_rank_shortens, 2)):
        assert result.stdout.strip() == (
            f"rank {rank}: the mixed precision is ar.config.set_mixed_precision('bfloat16') on "
            "rank 0 but ar.config.set_mixed_precision(None) on rank 1; set it on every rank, "
            "before the first step"
        )


def test_other_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="unknown mixed precision 'float16': there are bfloat16"):
        ar.config.set_mixed_precision("float16")
    assert ar.config.get_mixed_precision() == "bfloat16"
    monkeypatch.setattr("allreduce.devices.options.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install ml_dtypes"):
        ar.config.set_mixed_precision("bfloat16")
