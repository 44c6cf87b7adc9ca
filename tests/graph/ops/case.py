"""What the checks of an operator's values and gradient need to know, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from allreduce.graph.core.tensor import Tensor

Shapes = tuple[tuple[int, ...], ...]

ONE: tuple[Shapes, ...] = (((),), ((1,),), ((3, 4),), ((2, 1, 3),), ((0, 3),), ((3, 0),))
TWO: tuple[Shapes, ...] = (
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((1, 4), (3, 1)),
    ((), (2, 3)),
    ((2, 1, 3), (2, 1)),
    ((0, 4), (4,)),
    ((2, 0), (1, 1)),
)
ROWS: tuple[Shapes, ...] = (((3, 4),), ((1, 1),), ((2, 3, 5),), ((0, 3),), ((2, 40),))


@dataclass(frozen=True)
class Case:
    """An operator whose gradient is checked, and its values if `expected` is given.

    Attributes:
        op: The row of the operator table.
        call: Takes one float tensor per shape.
        shapes: The shapes to try.
        low: The inputs are drawn evenly from low…high,
        high: …
        away_from: but not closer than 0.05 to these, where the derivative jumps.
        distinct: No two elements of an input are closer than 0.05.
        expected: Computes the same from arrays, in NumPy.
    """

    op: str
    call: Callable[..., Tensor]
    shapes: Sequence[Shapes] = ONE
    low: float = -2.0
    high: float = 2.0
    away_from: Sequence[float] = field(default=())
    distinct: bool = False
    expected: Callable[..., np.ndarray] | None = None

    def draw(self, shapes: Shapes, seed: int) -> list[np.ndarray]:
        """Draw the inputs."""
        generator = np.random.default_rng([seed, *self.op.encode()])
        if self.distinct:
            sizes = [int(np.prod(shape)) for shape in shapes]
            steps = generator.permutation(sum(sizes)) * 0.05 - 1
            pieces = np.split(steps, np.cumsum(sizes)[:-1])
            return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        arrays = [generator.uniform(self.low, self.high, shape) for shape in shapes]
        for array in arrays:
            for point in self.away_from:
                array[np.abs(array - point) < 0.05] += 0.11
        return arrays
