"""Time one training step: ours beside a plain NumPy loop that does the same arithmetic.

    python benchmarks/training.py                # one process: ours against NumPy
    mpirun -n 2 python benchmarks/training.py    # and two processes against one

MLP 784-1024-1024-10, batch 128 per process, float32, Adam, one BLAS thread per process. Those
compared take turns within one run and get a new batch each time. With several ranks, rank 0 times
the one-process step while the others sleep in a barrier, so that both numbers come from one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from report import Row, summarize, write

import allreduce as ar

BATCH, SIZES = 128, (784, 1024, 1024, 10)
LEARNING_RATE, BETA_1, BETA_2, EPSILON = 1e-3, 0.9, 0.999, 1e-7


class NumpyLoop:
    """The same network, loss and optimizer as people write them by hand."""

    def __init__(self, weights: list[np.ndarray]) -> None:
        self.weights = [each.copy() for each in weights]
        self.m = [np.zeros_like(each) for each in weights]
        self.v = [np.zeros_like(each) for each in weights]
        self.steps = 0

    def step(self, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Do one step; returns the losses, one per sample."""
        w1, b1, w2, b2, w3, b3 = self.weights
        h1 = np.maximum(x @ w1 + b1, 0)
        h2 = np.maximum(h1 @ w2 + b2, 0)
        logits = h2 @ w3 + b3
        shifted = logits - logits.max(axis=1, keepdims=True)
        exponents = np.exp(shifted)
        total = exponents.sum(axis=1, keepdims=True)
        rows = np.arange(len(x))
        losses = np.log(total[:, 0]) - shifted[rows, labels]
        d3 = exponents / total
        d3[rows, labels] -= 1
        d3 /= len(x)
        d2 = (d3 @ w3.T) * (h2 > 0)
        d1 = (d2 @ w2.T) * (h1 > 0)
        self._adam([x.T @ d1, d1.sum(0), h1.T @ d2, d2.sum(0), h2.T @ d3, d3.sum(0)])
        return np.asarray(losses)

    def _adam(self, gradients: list[np.ndarray]) -> None:
        self.steps += 1
        rate = np.float32(
            LEARNING_RATE * np.sqrt(1 - BETA_2**self.steps) / (1 - BETA_1**self.steps)
        )
        for w, g, m, v in zip(self.weights, gradients, self.m, self.v, strict=True):
            m *= BETA_1
            m += (1 - BETA_1) * g
            v *= BETA_2
            v += (1 - BETA_2) * (g * g)
            w -= rate * m / (np.sqrt(v) + EPSILON)


def build() -> tuple[ar.nn.Model, Callable[..., object]]:
    """Make the network and its step, of the strategy in scope."""
    model = ar.nn.Sequential(
        [
            ar.nn.Input((SIZES[0],)),
            ar.nn.Dense(SIZES[1], activation="relu"),
            ar.nn.Dense(SIZES[2], activation="relu"),
            ar.nn.Dense(SIZES[3], activation="softmax"),
        ]
    )
    optimizer = ar.optim.Adam(LEARNING_RATE, BETA_1, BETA_2, EPSILON)

    @ar.function
    def step(x: ar.Tensor, labels: ar.Tensor) -> ar.Tensor:
        loss = ar.nn.losses.sparse_categorical_crossentropy(labels, model(x))
        optimizer.minimize(loss, model.trainable_variables)
        return loss

    return model, step


class Batches:
    """New random samples for every step, from a few made beforehand."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.images = [random.random((BATCH, SIZES[0]), np.float32) for _ in range(8)]
        self.labels = [random.integers(0, SIZES[3], BATCH) for _ in range(8)]
        self.taken = 0

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        self.taken += 1
        place = self.taken % len(self.images)
        return self.images[place], self.labels[place]


def alternate(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run the named steps in turn; returns the seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number >= 3:  # the first ones trace, allocate and warm up
                times[name].append(time.perf_counter() - start)
    return times


def one_process(rounds: int) -> list[Row]:
    """Time ours against NumPy, and check that they compute the same."""
    model, step = build()
    loop = NumpyLoop(model.get_weights())
    batches, same = Batches(0), Batches(0)
    for _ in range(3):
        ours, theirs = np.asarray(step(*batches.next())), loop.step(*same.next())
        np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    times = alternate(
        {
            "NumPy loop": lambda: loop.step(*batches.next()),
            "ours, 1 process": lambda: step(*batches.next()),
        },
        rounds,
    )
    return summarize("one process", times, baseline="NumPy loop")


def several_processes(rounds: int) -> list[Row]:
    """Time the same step alone on rank 0 and on all ranks, in turns of ten."""
    _, alone = build()
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        _, together = build()
    comm = strategy.communicator
    batches = Batches(comm.rank)
    ours, all_of_us = "ours, 1 process", f"ours, {comm.size} processes"
    times: dict[str, list[float]] = {ours: [], all_of_us: []}

    def on_all() -> None:
        images, labels = (ar.PerReplica((each,)) for each in batches.next())
        strategy.run(together, args=(images, labels))

    for _ in range(max(1, rounds // 10)):
        if comm.rank == 0:
            times[ours] += alternate({ours: lambda: alone(*batches.next())}, 10)[ours]
        comm.barrier()
        times[all_of_us] += alternate({all_of_us: on_all}, 10)[all_of_us]
        comm.barrier()
    return summarize(f"{comm.size} processes", times, baseline=ours) if comm.rank == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    ar.set_seed(0)
    ar.config.threading.set_intra_op_parallelism_threads(1)
    comm = ar.init()
    several = comm.size > 1
    rows = several_processes(options.rounds) if several else one_process(options.rounds)
    if comm.rank == 0:
        name = f"training-{comm.size}"
        write(rows, options.out / name, "MLP 784-1024-1024-10, batch 128 per process, Adam")


if __name__ == "__main__":
    main()
