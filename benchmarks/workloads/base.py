"""The definition of a case, for all contestants.

Needs only NumPy: peers import it in their own environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LEARNING_RATE, BETA_1, BETA_2, EPSILON = 1e-3, 0.9, 0.999, 1e-8  # Adam's, for all
_BATCHES = 8  # made beforehand, and reused in order


@dataclass(frozen=True)
class Workload:
    """One case: computation, initial weights, and samples.

    Args:
        name: Its name on the command line.
        title: Its name in tables.
        sides: The contestants, each with its number of processes.
        weights: Makes the initial weights, by name; equal for all processes.
        batch: Makes so many samples: what a step is called with.
        rows: The rows of a process in a step.
        shared: Whether these are of all processes together, each of which takes its share.
        agreement: By how much the losses of two sides may differ, relative to the larger one; None
            where they say nothing.
        mpi: Whether our processes are started by mpirun, not by our own launcher.
        backward: Whether sides also time the computation of gradients without what follows.
    """

    name: str
    title: str
    sides: tuple[tuple[str, int], ...]
    weights: Callable[[np.random.Generator], dict[str, Array]]
    batch: Callable[[np.random.Generator, int], tuple[Array, ...]]
    rows: int
    shared: bool = False
    agreement: float | None = 1e-3
    mpi: bool = False
    backward: bool = False

    def first_weights(self) -> dict[str, Array]:
        """Return the initial weights of all contestants."""
        return self.weights(np.random.default_rng(0))

    def samples(self, ranks: int) -> int:
        """Return how many samples all processes have in a step together."""
        return self.rows if self.shared else self.rows * ranks

    def batches(self, rank: int, ranks: int) -> Iterator[tuple[Array, ...]]:
        """Yield a process's samples, step by step, without end."""
        random = np.random.default_rng([1, 0 if self.shared else rank])
        made = [self.batch(random, self.rows) for _ in range(_BATCHES)]
        if self.shared:
            each = self.rows // ranks
            share = slice(rank * each, (rank + 1) * each)
            made = [tuple(array[share] for array in batch) for batch in made]
        while True:
            yield from made


def uniform(random: np.random.Generator, *shape: int, fan: int) -> Array:
    """Draw weights as Glorot and Bengio (2010) do; `fan` is the sum of inputs and outputs."""
    limit = np.sqrt(6 / fan)
    return random.uniform(-limit, limit, shape).astype(np.float32)


def zeros(*shape: int) -> Array:
    """Return a bias."""
    return np.zeros(shape, np.float32)
