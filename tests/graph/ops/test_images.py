"""Convolution, pooling, normalisation and attention against plain loops, and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.ops.nn import convolution
from tests.graph.interpret import interpret, record

RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(2, 6, 7, 4))
W = RANDOM.normal(size=(3, 2, 4, 6))
untyped: Any = ops


def _same(length: int, size: int, stride: int, dilation: int) -> tuple[int, int]:
    """Find the least padding with a window for every `stride` pixels, begun or whole."""
    reach, wanted = (size - 1) * dilation + 1, -(-length // stride)
    missing = 0
    while len(range(0, length + missing - reach + 1, stride)) < wanted:
        missing += 1
    return missing // 2, missing - missing // 2


def _convolved(
    x: np.ndarray, w: np.ndarray, strides: Any, pads: Any, dilation: Any, groups: int
) -> np.ndarray:
    wide = np.pad(x, ((0, 0), *pads, (0, 0)))
    reach = [(size - 1) * gap + 1 for size, gap in zip(w.shape[:2], dilation, strict=True)]
    rows = range(0, wide.shape[1] - reach[0] + 1, strides[0])
    columns = range(0, wide.shape[2] - reach[1] + 1, strides[1])
    out = np.zeros((len(x), len(rows), len(columns), w.shape[3]))
    into, outof = x.shape[3] // groups, w.shape[3] // groups
    for filter_ in range(w.shape[3]):
        first = filter_ // outof * into
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                window = wide[
                    :,
                    row : row + reach[0] : dilation[0],
                    column : column + reach[1] : dilation[1],
                    first : first + into,
                ]
                out[:, i, j, filter_] = (window * w[..., filter_]).sum(axis=(1, 2, 3))
    return out


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("padding", ["valid", "same", ((1, 0), (2, 3))])
@pytest.mark.parametrize(("dilation", "groups"), [((1, 1), 1), ((2, 2), 2), ((1, 3), 1)])
def test_conv2d_is_what_a_loop_gives(
    strides: Any, padding: Any, dilation: Any, groups: int
) -> None:
    w = W[:, :, : 4 // groups]
    pads = padding
    if padding == "valid":
        pads = ((0, 0), (0, 0))
    elif padding == "same":
        sizes = zip(X.shape[1:3], w.shape[:2], strides, dilation, strict=True)
        pads = tuple(_same(*each) for each in sizes)
    found = ops.conv2d(X, w, strides, padding, dilation, groups).numpy()
    np.testing.assert_allclose(found, _convolved(X, w, strides, pads, dilation, groups))
    if padding == "same":
        assert found.shape[1:3] == tuple(-(-n // s) for n, s in zip((6, 7), strides, strict=True))


@pytest.mark.parametrize("groups", [1, 2])
def test_images_are_convolved_in_pieces(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = RANDOM.integers(-3, 4, (3, 11, 6, 4)).astype(float)  # so that sums are exact
    w = RANDOM.integers(-3, 4, (3, 2, 4 // groups, 6)).astype(float)

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        y = ops.conv2d(x, w, (2, 1), ((1, 2), (0, 1)), groups=groups)
        return [y, *backward(y, [x, w], y)]

    specs = [Spec(each.shape, each.dtype) for each in (x, w)]
    whole = interpret(record(step, *specs), [x, w])
    one = 6 * 3 * 2 * 4 // groups * 8  # bytes for a row of windows, of which an image has six
    for size in (1, 2 * one, 4 * one, 12 * one):
        monkeypatch.setattr(convolution, "_ROWS_BYTES", size)
        for found, expected in zip(interpret(record(step, *specs), [x, w]), whole, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("padding", ["valid", "same", ((1, 0), (0, 2))])
@pytest.mark.parametrize(("size", "strides"), [(2, None), ((3, 2), (1, 2))])
def test_pooling_is_what_a_loop_gives(size: Any, strides: Any, padding: Any) -> None:
    sizes = (size, size) if isinstance(size, int) else size
    steps = strides or sizes
    pads = padding
    if padding == "valid":
        pads = ((0, 0), (0, 0))
    elif padding == "same":
        pads = tuple(_same(*each, 1) for each in zip(X.shape[1:3], sizes, steps, strict=True))
    wide = np.pad(X, ((0, 0), *pads, (0, 0)), constant_values=np.nan)
    rows = range(0, wide.shape[1] - sizes[0] + 1, steps[0])
    columns = range(0, wide.shape[2] - sizes[1] + 1, steps[1])
    largest = ops.max_pool2d(X, size, strides, padding).numpy()
    average = ops.average_pool2d(X, size, strides, padding).numpy()
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            window = wide[:, row : row + sizes[0], column : column + sizes[1]]
            np.testing.assert_array_equal(largest[:, i, j], np.nanmax(window, axis=(1, 2)))
            np.testing.assert_allclose(average[:, i, j], np.nanmean(window, axis=(1, 2)))
    np.testing.assert_allclose(ops.global_average_pool2d(X).numpy(), X.mean(axis=(1, 2)))
    np.testing.assert_array_equal(ops.global_max_pool2d(X).numpy(), X.max(axis=(1, 2)))


def test_the_first_of_equal_pixels_has_the_gradient() -> None:
    x = np.zeros((1, 4, 4, 1))
    graph = record(
        lambda x, dy: backward(ops.max_pool2d(x), [x], dy),
        *(Spec(shape, x.dtype) for shape in (x.shape, (1, 2, 2, 1))),
    )
    (found,) = interpret(graph, [x, np.arange(1.0, 5).reshape(1, 2, 2, 1)])
    expected = [[1, 0, 2, 0], [0] * 4, [3, 0, 4, 0], [0] * 4]
    np.testing.assert_array_equal(found[0, ..., 0], expected)


def test_normalisation_is_its_definition() -> None:
    def normal(x: np.ndarray, axes: Any, epsilon: float) -> np.ndarray:
        return np.asarray(
            (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)
        )

    gamma, beta = RANDOM.normal(size=(2, 4))
    found = ops.layer_norm(X, gamma, beta, epsilon=1e-3).numpy()
    np.testing.assert_allclose(found, normal(X, -1, 1e-3) * gamma + beta)
    grouped = normal(X.reshape(2, 6, 7, 2, 2), (1, 2, 4), 1e-5).reshape(X.shape)
    np.testing.assert_allclose(ops.group_norm(X, 2, gamma, beta).numpy(), grouped * gamma + beta)
    half = np.full((3, 300), 300, np.float16)  # whose sum, and squares, float16 cannot hold
    np.testing.assert_array_equal(ops.normalize(half).numpy(), np.zeros_like(half))


def test_attention_is_its_definition() -> None:
    q, k, v = (RANDOM.normal(size=shape) for shape in ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 2)))
    mask = RANDOM.uniform(size=(2, 1, 1, 6)) < 0.7
    mask[..., 0] = True
    scores = q @ k.swapaxes(-1, -2) / 2
    for causal in (False, True):
        allowed = mask & np.tri(5, 6, dtype=bool) if causal else np.broadcast_to(mask, scores.shape)
        weights = np.where(allowed, np.exp(scores), 0)
        expected = weights / weights.sum(-1, keepdims=True) @ v
        found = ops.scaled_dot_product_attention(q, k, v, mask, causal)
        np.testing.assert_allclose(found.numpy(), expected)


def test_a_query_without_any_key_gets_the_mean() -> None:
    v = RANDOM.normal(size=(2, 3))
    found = ops.scaled_dot_product_attention(np.ones((1, 3)), v, v, np.zeros((1, 2), bool))
    np.testing.assert_allclose(found.numpy(), v.mean(axis=0, keepdims=True))


def test_a_masked_key_stays_masked_where_a_score_overflows() -> None:
    q, k, v = (
        np.array(x, np.float16) for x in ([[200.0] * 4], [[-200.0] * 4, [0] * 4], [[1], [2]])
    )
    for mask, expected in (([True, False], 1), ([True, True], 2), ([False, False], 1.5)):
        found = ops.scaled_dot_product_attention(q, k, v, np.array(mask)).numpy()
        assert found.tolist() == [[expected]]


def test_halves_are_averaged_in_more() -> None:
    x = np.full((1, 20, 20, 1), 300, np.float16)  # whose sum float16 cannot hold
    assert ops.average_pool2d(x, 20).numpy().tolist() == [[[[300]]]]
    assert ops.global_average_pool2d(x).numpy().tolist() == [[300]]


def test_a_named_batch_goes_through() -> None:
    def network(x: Tensor) -> list[Tensor]:
        h = ops.max_pool2d(ops.relu(ops.conv2d(x, W, padding="same")))
        return [ops.global_average_pool2d(ops.group_norm(h, 3)), ops.normalize(h, (0, 1, 2))]

    graph = record(network, Spec((BATCH, 6, 7, 4), np.dtype(np.float64)))
    assert [str(graph.nodes[i].spec) for i in graph.outputs] == [
        "float64(batch, 6)",
        "float64(batch, 3, 3, 6)",
    ]
    for rows in (0, 1, 2):
        for found, expected in zip(
            interpret(graph, [X[:rows]], rows), network(X[:rows] + ops.zeros((1,))), strict=True
        ):
            np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ops.conv2d(X[0], W), "takes images .batch, height, width, channels."),
        (lambda: ops.conv2d(X, W[0]), "a kernel of conv2d is .height, width"),
        (lambda: ops.conv2d(X, W[:, :, :3]), r"do not fit in 1 groups: .*kernel \(…, 4 / 1"),
        (lambda: ops.conv2d(X, W, groups=4), "do not fit in 4 groups"),
        (lambda: ops.conv2d(X, W, strides=0), "sizes are 1 or more"),
        (lambda: untyped.conv2d(X, W, strides=(1, 2, 3)), "one integer or a pair"),
        (lambda: ops.conv2d(X, W, padding="sane"), "did you mean 'same'"),
        (lambda: ops.conv2d(X, W, padding=3), r"\(\(top, bottom\), \(left, right\)\), not 3"),
        (lambda: ops.conv2d(X, W, padding=((-1, 0), (0, 0))), "is not negative"),
        (
            lambda: ops.max_pool2d(X, 2, 1, ((2, 0), (0, 0))),
            "lie outside of the image",
        ),
        (lambda: ops.average_pool2d(X, (3, 2), 1, ((0, 0), (1, 2))), "hold nothing"),
        (lambda: untyped.average_pool2d(X, 2, 1, ((0.9, 0), (0, 0))), r"not \(\(0.9, 0\)"),
        (lambda: ops.conv2d(X, W[..., :0]), "a kernel of conv2d is .height, width"),
        (lambda: ops.conv2d(X[..., :0], W[:, :, :0]), "a kernel of conv2d is .height, width"),
        (lambda: ops.scaled_dot_product_attention(X[..., :0], X[..., :0], X), "needs features"),
        (lambda: ops.max_pool2d(X, 8), "windows of 8×8 do not fit images of 6×7"),
        (lambda: ops.conv2d(X, W, dilation=3), "with dilation 3×3 do not fit"),
        (lambda: ops.group_norm(X, 3), "3 groups do not divide the channels"),
        (lambda: ops.normalize(X, epsilon=0), "epsilon of a normalisation is positive"),
        (lambda: ops.scaled_dot_product_attention(X, X[..., :2], X), "attention takes queries"),
        (lambda: ops.scaled_dot_product_attention(X, X, X, X), "a mask holds booleans"),
        (
            lambda: ops.scaled_dot_product_attention(X, X, X, X[0] > 0),
            r"the mask .* has shape \(6,",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, said: str) -> None:
    with pytest.raises((ShapeError, UsageError), match=said):
        call()


@pytest.mark.parametrize("shared", [False, True])  # by all of the batch
def test_the_gradient_of_keys_lies_as_the_keys_do(shared: bool) -> None:
    """Scores are products with transposed keys, whose gradient is not transposed back."""
    queries, keys = RANDOM.normal(size=(2, 3, 5, 4)), RANDOM.normal(size=(2, 3, 6, 4))
    keys = keys[:1] if shared else keys
    dy = RANDOM.normal(size=(2, 3, 5, 6))

    def step(q: Tensor, k: Tensor, dy: Tensor) -> list[Tensor]:
        return backward(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))), [q, k], dy)

    given = [queries, keys, dy]
    graph = record(step, *(Spec(each.shape, each.dtype) for each in given))
    of_queries, of_keys = interpret(graph, given)
    np.testing.assert_allclose(of_queries, dy @ keys)
    expected = np.einsum("bhqk,bhqd->bhkd", dy, queries)
    np.testing.assert_allclose(of_keys, expected.sum(0, keepdims=True) if shared else expected)
    products = [node for node in graph.nodes if node.op == "matmul"]
    assert (2, 3, 6, 4) in {node.spec.shape for node in products}
