"""One row per operator that has a gradient: how to call it, and on which inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from allreduce.graph.ops import functions as ops
from allreduce.graph.tensor import Tensor
from allreduce.graph.trace import apply

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
    """An operator's gradient to be checked.

    Attributes:
        op: The row of the operator table.
        call: Takes one float tensor per shape.
        shapes: The shapes to try.
        low: The inputs are drawn evenly from low…high,
        high: …
        away_from: but not closer than 0.05 to these, where the derivative jumps.
        distinct: No two elements of an input are closer than 0.05.
    """

    op: str
    call: Callable[..., Tensor]
    shapes: Sequence[Shapes] = ONE
    low: float = -2.0
    high: float = 2.0
    away_from: Sequence[float] = field(default=())
    distinct: bool = False

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


def _condition(x: Tensor) -> Tensor:
    return ops.greater(ops.stop_gradient(x), 0)


def _labels(logits: Tensor) -> Tensor:
    shape = [size for size in logits.shape[:-1] if isinstance(size, int)]
    classes = logits.shape[-1]
    assert isinstance(classes, int)
    labels = np.arange(int(np.prod(shape))).reshape(shape) * 7 % classes
    return ops.sparse_softmax_cross_entropy(labels, logits)


def _broadcast(x: Tensor) -> Tensor:
    return ops.broadcast_to(x, (4, 3, *x.shape[1:]))


def _sum_to(x: Tensor) -> Tensor:
    return ops.sum_to(x, tuple(1 if i % 2 else s for i, s in enumerate(x.shape))[1:])


MATRICES: tuple[Shapes, ...] = (
    ((2, 3), (3, 4)),
    ((1, 1), (1, 1)),
    ((5, 2, 3), (5, 3, 1)),
    ((2, 1, 2, 3), (3, 3, 2)),
    ((2, 4, 3), (3, 2)),
    ((3,), (3, 2)),
    ((2, 3), (3,)),
    ((3,), (3,)),
    ((2, 4, 3), (3,)),
    ((3,), (2, 3, 4)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 3)),
    ((2, 3), (3, 0)),
)
PAIRS: tuple[Shapes, ...] = tuple((rows[0], rows[0]) for rows in ROWS)
SPREAD: tuple[Shapes, ...] = (((3,),), ((1, 2),), ((3, 1),), ((1, 0),))
SUMMED: tuple[Shapes, ...] = (((3, 4),), ((5, 2, 3),), ((1, 1),), ((0, 3),), ((2, 0, 4),))
FILLED: tuple[Shapes, ...] = (((),), ((4,),), ((3, 4),), ((2, 1, 3),))

CASES: tuple[Case, ...] = (
    Case("add", ops.add, TWO),
    Case("subtract", ops.subtract, TWO),
    Case("multiply", ops.multiply, TWO),
    Case("divide", ops.divide, TWO, low=0.5),
    Case("power", ops.power, TWO, low=0.3),
    Case("power", lambda x: x**3, away_from=[0]),
    Case("power", lambda x: 3.0**x),
    Case("maximum", ops.maximum, TWO, distinct=True),
    Case("minimum", ops.minimum, TWO, distinct=True),
    Case("negative", ops.negative),
    Case("absolute", ops.absolute, away_from=[0]),
    Case("exp", ops.exp),
    Case("log", ops.log, low=0.3),
    Case("sqrt", ops.sqrt, low=0.3),
    Case("square", ops.square),
    Case("clip", lambda x: ops.clip(x, -1, 0.5), away_from=[-1, 0.5]),
    Case("where", lambda x, a, b: ops.where(_condition(x), a, b), [(s[0], *s) for s in TWO]),
    Case("cast", lambda x: ops.cast(ops.cast(x, "longdouble"), "float64")),
    Case("relu", ops.relu, away_from=[0]),
    Case("relu_gradient", lambda dy, y: apply("relu_gradient", dy, y), PAIRS, away_from=[0]),
    Case("tanh", ops.tanh),
    Case("sigmoid", ops.sigmoid),
    Case("erf", ops.erf),
    Case("erf", ops.gelu),
    Case("tanh", lambda x: ops.gelu(x, approximate=True)),
    Case("softmax", ops.softmax, ROWS),
    Case("softmax", lambda x: ops.softmax(x, axis=0), ROWS),
    Case("log_softmax", ops.log_softmax, ROWS),
    Case("log_softmax", lambda x: ops.log_softmax(x, axis=-2), ROWS),
    Case("sparse_softmax_cross_entropy", _labels, ROWS),
    Case("softmax_cross_entropy", ops.softmax_cross_entropy, PAIRS),
    Case("matmul", ops.matmul, MATRICES),
    Case("reshape", lambda x: ops.reshape(x, (1, -1, 1))),
    Case("reshape", lambda x: ops.squeeze(ops.expand_dims(x, 1), 1), ROWS),
    Case("reshape", ops.flatten, [((2, 3, 4),), ((0, 2, 2),), ((3,),)]),
    Case("transpose", ops.transpose, [((3, 4),), ((2, 1, 3),), ((0, 2),)]),
    Case("transpose", lambda x: ops.transpose(x, (2, 0, 1)), [((2, 1, 3),), ((2, 0, 4),)]),
    Case("broadcast_to", _broadcast, SPREAD),
    Case("sum_to", _sum_to, SUMMED),
    Case("sum", ops.sum),
    Case("sum", lambda x: ops.sum(x, axis=0), ROWS),
    Case("sum", lambda x: ops.sum(x, axis=(0, -1), keepdims=True), ROWS),
    Case("mean", ops.mean, FILLED),
    Case("mean", lambda x: ops.mean(x, axis=-1), ROWS),
    Case("max", ops.max, FILLED, distinct=True),
    Case("max", lambda x: ops.max(x, axis=-1), ROWS, distinct=True),
    Case("min", ops.min, FILLED, distinct=True),
    Case("min", lambda x: ops.min(x, axis=1, keepdims=True), ROWS, distinct=True),
    Case("dropout", lambda x: ops.dropout(x, 0.4, seed=5)),
)
