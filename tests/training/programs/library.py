"""The names that the programs use, of this library or of Keras, and what they have in common."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

UPDATES = 20  # whose losses are compared


def allreduce_library() -> SimpleNamespace:
    """Return this library's names, in a strategy of all ranks."""
    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    return SimpleNamespace(
        scope=strategy.scope,
        layers=ar.nn,
        BatchNorm=lambda: ar.nn.BatchNorm(synchronized=True),
        Model=ar.nn.Model,
        Sequential=ar.nn.Sequential,
        callbacks=ar.callbacks,
        optimizers=ar.optim,
        schedules=ar.optim.schedules,
        set_seed=ar.set_seed,
    )


def keras_library() -> SimpleNamespace:
    """Return Keras's names."""
    import keras

    return SimpleNamespace(
        scope=nullcontext,
        layers=keras.layers,
        BatchNorm=keras.layers.BatchNormalization,
        Model=keras.Model,
        Sequential=keras.Sequential,
        callbacks=keras.callbacks,
        optimizers=keras.optimizers,
        schedules=keras.optimizers.schedules,
        set_seed=keras.utils.set_random_seed,
    )


def start(model: Any, seed: int = 0) -> None:
    """Give a built model's kernels values that do not depend on the library."""
    random = np.random.default_rng(seed)

    def fresh(weight: np.ndarray) -> np.ndarray:
        if weight.ndim < 2:
            return weight
        fan_in = np.prod(weight.shape[:-1])
        values: np.ndarray = random.normal(size=weight.shape) * np.sqrt(1 / fan_in)
        return values.astype(weight.dtype)

    model.set_weights([fresh(np.asarray(weight)) for weight in model.get_weights()])


def losses_of(library: Any, rows: int, batch_size: int) -> tuple[list[float], Any]:
    """Return a list, and a callback that appends each update's loss.

    Logs have the mean over the epoch so far. Times the rows so far it is a sum, and the difference
    of two sums gives an update's loss.

    Args:
        library: The library.
        rows: How many rows an epoch has.
        batch_size: How many rows a batch has, but perhaps the last.
    """
    losses: list[float] = []
    sums = [0.0]  # of the epoch before each batch

    def note(batch: int, logs: Any) -> None:
        before, done = batch * batch_size, min(rows, (batch + 1) * batch_size)
        del sums[batch + 1 :]
        sums.append(float(logs["loss"]) * done)
        if len(losses) < UPDATES:
            losses.append((sums[-1] - sums[-2]) / (done - before))

    return losses, library.callbacks.LambdaCallback(on_train_batch_end=note)


def result(losses: list[float], **metrics: Any) -> dict[str, Any]:
    """Return what a program is judged by."""
    return {"losses": losses, "metrics": {name: float(value) for name, value in metrics.items()}}


def classes(rows: int, features: int, count: int, seed: int = 1) -> tuple[Any, Any]:
    """Make samples around one centre per class: (rows, features) float32 and labels (rows,)."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, count, rows)
    centres = random.normal(size=(count, features)) * 1.5
    return (centres[labels] + random.normal(size=(rows, features))).astype("float32"), labels
