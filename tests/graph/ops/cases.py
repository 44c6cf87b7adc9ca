"""One row per operator that has a gradient: how to call it, and on which inputs."""

from __future__ import annotations

import math

import numpy as np

from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.ops.array.windows import Windows
from allreduce.graph.trace.dispatch import apply
from tests.graph.ops.case import ROWS, TWO, Case, Shapes


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
    ((2, 4, 0), (0, 2)),
    ((2, 0, 3), (3, 2)),
    ((0, 2, 3), (0, 3, 1)),
    ((2, 1, 0), (2, 0, 3)),
    ((2, 4, 0), (0,)),
)
PAIRS: tuple[Shapes, ...] = tuple((rows[0], rows[0]) for rows in ROWS)
SPREAD: tuple[Shapes, ...] = (((3,),), ((1, 2),), ((3, 1),), ((1, 0),))
SUMMED: tuple[Shapes, ...] = (((3, 4),), ((5, 2, 3),), ((1, 1),), ((0, 3),), ((2, 0, 4),))
FILLED: tuple[Shapes, ...] = (((),), ((4,),), ((3, 4),), ((2, 1, 3),))

JOINED: tuple[Shapes, ...] = (((2, 3), (2, 1)), ((1, 2), (1, 0)), ((0, 3), (0, 1)), ((3,), (2,)))
PART = (slice(1, 5, 2), slice(None))
INDICES = np.array([[0, 2, 2], [-1, 0, 1]])


def _own_rows(x: Tensor) -> Tensor:
    return apply("own_rows", x, np.int64(2), shape=(1, *x.shape[1:]))


def _among_rows(x: Tensor) -> Tensor:
    (rows, *others) = x.shape
    return apply("among_rows", x, np.int64(1), shape=(3 * rows, *others), rows=rows)


def _scatter(dy: Tensor) -> Tensor:
    return apply("scatter_add", dy, np.array([1, 0, 1, -2]), axis=1, shape=(dy.shape[0], 3))


def _chosen(x: Tensor, along: int) -> np.ndarray:
    (rows, *_) = x.shape
    assert isinstance(rows, int)
    return np.resize([1, 0, 1, -1], (rows, along))


def _along(x: Tensor) -> Tensor:
    return ops.take_along_axis(x, _chosen(x, 4), axis=1)


def _add_along(dy: Tensor) -> Tensor:
    indices = _chosen(dy, int(dy.shape[1]))
    return apply("add_along_axis", dy, indices, axis=1, shape=(dy.shape[0], 3))


IMAGES: tuple[Shapes, ...] = (((2, 4, 5, 3),), ((1, 3, 3, 1),), ((0, 4, 4, 2),))
CONVOLVED: tuple[Shapes, ...] = (
    ((2, 4, 5, 3), (2, 3, 3, 4)),
    ((1, 3, 3, 1), (3, 3, 1, 1)),
    ((2, 3, 3, 2), (1, 1, 2, 3)),
    ((0, 4, 4, 2), (2, 2, 2, 1)),
)
GROUPED: tuple[Shapes, ...] = (((2, 3, 4, 4), (2, 2, 2, 6)), ((1, 2, 2, 2), (1, 1, 1, 2)))
ATTENDED: tuple[Shapes, ...] = (
    ((2, 3, 4), (2, 5, 4), (2, 5, 2)),
    ((1, 2, 2), (1, 1, 2), (1, 1, 1)),
    ((0, 3, 2), (0, 2, 2), (0, 2, 2)),
)
SELF: tuple[Shapes, ...] = (((2, 4, 3), (2, 4, 3)), ((3, 2), (3, 2)))


def _padded_convolution(x: Tensor, w: Tensor) -> Tensor:
    """Its forward has a gradient of a convolution, whose own gradients are checked so."""
    windows = Windows((w.shape[0], w.shape[1]), (1, 1))  # type: ignore[arg-type]
    y = ops.conv2d(x, w)
    return apply("conv2d_images", y, w, windows=windows, groups=1, shape=x.shape)


def _transposed(dy: Tensor, w: Tensor) -> Tensor:
    windows = Windows((2, 2), (2, 1), before=(1, 0), after=(0, 1))
    shape = (dy.shape[0], 4, 3, 2)
    return apply("conv2d_images", dy, w, windows=windows, groups=2, shape=shape)


def _kernels(x: Tensor, dy: Tensor) -> Tensor:
    windows = Windows((2, 2), (1, 1))
    return apply("conv2d_kernel", x, dy, windows=windows, groups=2, shape=(2, 2, 1, 4))


def _least_kernel(x: Tensor, dy: Tensor) -> Tensor:
    return apply("conv2d_kernel", x, dy, windows=Windows((1, 1), (1, 1)), groups=1, shape=(1,) * 4)


def _spread(dy: Tensor) -> Tensor:
    windows = Windows((2, 2), (2, 2), after=(1, 0))
    shape = (dy.shape[0], 3, 4, dy.shape[3])
    return apply("average_pool2d_gradient", dy, windows=windows, shape=shape)


LABELLED: tuple[Shapes, ...] = (((3,), (3, 4)), ((1,), (1, 1)), ((2, 3), (2, 3, 5)), ((0,), (0, 3)))


def _sparse_slope(dy: Tensor, logits: Tensor) -> Tensor:
    labels = np.resize([0, 2, 1, 0], dy.shape) % logits.shape[-1]
    return apply("sparse_softmax_cross_entropy_gradient", dy, labels, logits)


def _slope(dy: Tensor, targets: Tensor, logits: Tensor) -> Tensor:
    return apply("softmax_cross_entropy_gradient", dy, targets, logits)


def _unpooled(dy: Tensor, x: Tensor) -> Tensor:
    windows, still = Windows((2, 3), (2, 2)), ops.stop_gradient(x)
    y = apply("max_pool2d", still, windows=windows)
    return apply("max_pool2d_gradient", dy, still, y, windows=windows) + 0.0 * ops.sum(x)


def _chosen_pixels(u: Tensor, x: Tensor) -> Tensor:
    windows, still = Windows((2, 2), (1, 2), before=(1, 0)), ops.stop_gradient(x)
    y = apply("max_pool2d", still, windows=windows)
    return apply("max_pool2d_chosen", u, still, y, windows=windows) + 0.0 * ops.sum(x)


@np.vectorize(otypes=[float])
def _gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x)
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _normalized(x: np.ndarray) -> np.ndarray:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1))


def _normal_slope(dy: Tensor, x: Tensor) -> Tensor:
    y = ops.normalize(x, -1, 0.1)
    return apply("normalize_gradient", dy, x, y, axes=(x.ndim - 1,), epsilon=0.1)


CASES: tuple[Case, ...] = (
    Case("add", ops.add, TWO),
    Case("subtract", ops.subtract, TWO),
    Case("multiply", ops.multiply, TWO),
    Case("divide", ops.divide, TWO, low=0.5),
    Case("remainder", ops.remainder, TWO, low=0.3),
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
    Case("erf", ops.erf, expected=np.vectorize(math.erf, otypes=[float])),
    Case("erf", ops.gelu, expected=_gelu),
    Case("tanh", lambda x: ops.gelu(x, approximate=True)),
    Case("softmax", ops.softmax, ROWS, expected=_softmax),
    Case("softmax", lambda x: ops.softmax(x, axis=0), ROWS),
    Case("log_softmax", ops.log_softmax, ROWS, expected=lambda x: np.log(_softmax(x))),
    Case("log_softmax", lambda x: ops.log_softmax(x, axis=-2), ROWS),
    Case("sparse_softmax_cross_entropy", _labels, ROWS),
    Case("softmax_cross_entropy", ops.softmax_cross_entropy, PAIRS),
    Case("sparse_softmax_cross_entropy_gradient", _sparse_slope, LABELLED),
    Case("softmax_cross_entropy_gradient", _slope, [(s[0], s[1], s[1]) for s in LABELLED]),
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
    Case("mean", lambda x: ops.var(x, axis=(0, -1), keepdims=True), ROWS),
    Case("sqrt", lambda x: ops.std(x, axis=-1, ddof=1), [((3, 4),), ((2, 3, 5),), ((0, 3),)]),
    Case("max", ops.max, FILLED, distinct=True),
    Case("max", lambda x: ops.max(x, axis=-1), ROWS, distinct=True),
    Case("min", ops.min, FILLED, distinct=True),
    Case("min", lambda x: ops.min(x, axis=1, keepdims=True), ROWS, distinct=True),
    Case("log1p", ops.log1p, low=-0.5),
    Case("expm1", ops.expm1),
    Case("sin", ops.sin),
    Case("cos", ops.cos),
    Case("cumsum", lambda x: ops.cumsum(x, 0), ROWS),
    Case("cumsum", lambda x: ops.cumsum(x, -1, reverse=True), ROWS),
    Case("slice", lambda x: x[..., ::2], ROWS),
    Case("slice", lambda x: x[None, :, -1:, ...], [((3, 4),), ((2, 3, 5),), ((0, 3),)]),
    Case("slice", lambda x: x[1:, ::-1], [((3, 4),), ((1, 2),), ((2, 3),)]),
    Case("unslice", lambda dy: apply("unslice", dy, index=PART, shape=(5, 2)), [((2, 2),)]),
    Case("take", lambda x: ops.take(x, INDICES, axis=-1), [((2, 3),), ((3,),), ((0, 3),)]),
    Case("take", lambda x: x[INDICES], [((3, 2),), ((3,),), ((3, 0),), ((3, 2, 1),)]),
    Case("own_rows", _own_rows, [((3, 2),), ((4,),)]),
    Case("among_rows", _among_rows, [((2, 3),), ((1,),), ((0, 3),)]),
    Case("scatter_add", _scatter, [((2, 4),), ((1, 4),), ((0, 4),)]),
    Case("take_along_axis", _along, [((2, 3),), ((1, 5),), ((0, 3),)]),
    Case("add_along_axis", _add_along, [((2, 3),), ((1, 4),), ((0, 2),)]),
    Case("take_along_axis", lambda x: ops.top_k(x, 2)[0], [((3, 4),), ((2,),)], distinct=True),
    Case("concatenate", lambda a, b: ops.concatenate([a, b, a], axis=-1), JOINED),
    Case("concatenate", lambda a, b: ops.stack([a, b], axis=1), PAIRS),
    Case("slice", lambda x: ops.split(x, [1, 2], axis=0)[1], [((3, 4),), ((3,),), ((3, 0),)]),
    Case("broadcast_to", lambda x: ops.tile(x, (2, 3)), ROWS),
    Case("pad", lambda x: ops.pad(x, 1, value=2.0), ROWS),
    Case("conv2d", ops.conv2d, CONVOLVED),
    Case("conv2d_images", _padded_convolution, CONVOLVED),
    Case("conv2d", lambda x, w: ops.conv2d(x, w, (2, 1), "same", (1, 2)), CONVOLVED),
    Case("conv2d", lambda x, w: ops.conv2d(x, w, 1, ((0, 1), (2, 0)), groups=2), GROUPED),
    Case("conv2d_kernel", _kernels, [((2, 3, 3, 2), (2, 2, 2, 4)), ((0, 3, 3, 2), (0, 2, 2, 4))]),
    Case("conv2d_kernel", _least_kernel, [((1, 1, 1, 1), (1, 1, 1, 1)), ((2, 2, 1, 1),) * 2]),
    Case(
        "conv2d_images", _transposed, [((2, 2, 3, 2), (2, 2, 1, 2)), ((0, 2, 3, 2), (2, 2, 1, 2))]
    ),
    Case("max_pool2d", ops.max_pool2d, IMAGES, distinct=True),
    Case("max_pool2d", lambda x: ops.max_pool2d(x, 3, 2, "same"), IMAGES, distinct=True),
    Case(
        "max_pool2d_gradient",
        _unpooled,
        [((2, 2, 2, 3), (2, 4, 5, 3)), ((0, 1, 1, 2), (0, 3, 3, 2))],
    ),
    Case("max_pool2d_chosen", _chosen_pixels, [(s[0], s[0]) for s in IMAGES]),
    Case("average_pool2d", ops.average_pool2d, IMAGES),
    Case("average_pool2d", lambda x: ops.average_pool2d(x, 3, (1, 2), "same"), IMAGES),
    Case("average_pool2d_gradient", _spread, [((1, 2, 2, 1),), ((2, 2, 2, 3),), ((0, 2, 2, 1),)]),
    Case("normalize", lambda x: ops.normalize(x, -1, 0.1), ROWS, expected=_normalized),
    Case("normalize", lambda x: ops.normalize(x, (0, 1), 0.1), [((3, 4),), ((2, 1, 3),)]),
    Case("normalize_gradient", _normal_slope, PAIRS),
    Case("normalize", ops.layer_norm, [((3, 4), (4,), (4,)), ((2, 2, 3), (3,), (1,))]),
    Case("normalize", lambda x: ops.group_norm(x, 2, epsilon=0.1), [((2, 3, 4),), ((0, 3, 4),)]),
    Case("softmax", ops.scaled_dot_product_attention, ATTENDED),
    Case("where", lambda q, k: ops.scaled_dot_product_attention(q, k, k, causal=True), SELF),
    Case("dropout", lambda x: ops.dropout(x, 0.4, seed=5)),
)
