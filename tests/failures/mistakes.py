"""Common mistakes in a job: mistakes.py NAME. Every rank runs the same mistake."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

import allreduce as ar

CROSS_ENTROPY = "sparse_categorical_crossentropy"


def data(rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Return samples (rows, 6) and their labels from 0 to 2."""
    generator = np.random.default_rng(0)
    return generator.random((rows, 6), np.float32), generator.integers(0, 3, rows)


def classifier(units: int = 8) -> ar.nn.Sequential:
    """Return a compiled model."""
    model = ar.nn.Sequential([ar.nn.Dense(units, "relu"), ar.nn.Dense(3, "softmax")])
    model.compile("adam", CROSS_ENTROPY)
    return model


def fit(x: Any, y: Any, units: int = 8) -> None:
    """Train on all ranks."""
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier(units)
    model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)


def mirrored_in_a_larger_world() -> None:
    ar.MirroredStrategy()


def fit_without_a_strategy() -> None:
    classifier().fit(*data(), verbose=0)


def init_with_other_arguments() -> None:
    ar.init()
    ar.init(timeout=7)


def use_after_close() -> None:
    comm = ar.init()
    comm.close()
    comm.all_reduce(np.ones(3))


def unknown_optimizer() -> None:
    with ar.MultiWorkerMirroredStrategy().scope():
        ar.nn.Sequential([ar.nn.Dense(1)]).compile("adamm", "mse")


def a_label_in_one_ranks_rows() -> None:
    x, y = data()
    y[39] = 3
    fit(x, y)


def a_nan_in_one_ranks_rows() -> None:
    x, y = data()
    x[39] = np.nan
    fit(x, y)


def different_arrays() -> None:
    x, y = data()
    x[7] += ar.init().rank
    fit(x, y)


def different_models() -> None:
    fit(*data(), units=8 + ar.init().rank)


def different_seeds() -> None:
    ar.set_seed(ar.init().rank)
    fit(*data())


def different_calls() -> None:
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()
    x, y = data()
    if strategy.communicator.rank == 1:
        model.predict(x, verbose=0)
    else:
        model.fit(x, y, verbose=0)


def a_place_to_save_to_that_takes_no_file() -> None:
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()
    model.build((None, 6))
    if strategy.communicator.rank == 1:
        model.save("/proc/model")
    model.predict(data()[0], verbose=0)


def a_variable_of_no_scope() -> None:
    weight = ar.Variable(np.ones(6, np.float32), name="weight")
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        optimizer = ar.optim.SGD(0.1)

        @ar.function
        def step(x: ar.Tensor) -> None:
            optimizer.minimize(ar.ops.sum(x * weight, axis=1), [weight])

    for (x,) in strategy.distribute_dataset([(data()[0],)]):
        strategy.run(step, args=(x,))


def a_truncated_model_on_one_rank() -> None:
    strategy = ar.MultiWorkerMirroredStrategy()
    comm = strategy.communicator
    path = Path(sys.argv[2]) / f"model-{comm.rank}"
    with strategy.scope():
        model = classifier()
        model.build((None, 6))
        model.save(path)
        if comm.rank == 1:
            path.write_bytes(path.read_bytes()[:-5])
        loaded = ar.nn.load_model(path)
    path.unlink()
    loaded.fit(*data(), verbose=0)


def symmetric_memory_that_nobody_has() -> None:
    ar.init().empty((1 << 45,), "float32")


def a_model_that_one_rank_has_no_memory_for() -> None:
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier(2_000_000)
    model.build((None, 6))
    if strategy.communicator.rank == 1:  # enough for the parameters, too little for a region
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), used + (128 << 20)))
    model.fit(*data(), verbose=0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
