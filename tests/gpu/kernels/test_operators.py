"""Operators and their gradients have the same values on a GPU as on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices.cuda import modules
from allreduce.graph.core import op_table

ops = ar.ops
RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


WORDS = np.array([[3, 0, 3], [6, 3, 1]], np.int32)
GRID = np.array([[2, 0, 2, 1], [0, 0, 1, 2]], np.int64)
IMAGES = floats(3, 7, 6, 4)
WITH_TIES = np.round(IMAGES)

# Of variables; constants are captured.
CASES: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "embedding": (lambda t: ops.embedding(t, WORDS), [floats(7, 5)]),
    "take": (lambda t: ops.take(t, WORDS - 7, axis=1), [floats(2, 7, 3)]),
    "take of bytes": (lambda t: ops.take(t, WORDS.astype(np.uint8)), [floats(7)]),
    "take_along_axis": (lambda t: ops.take_along_axis(t, GRID, axis=1), [floats(2, 3)]),
    "one_hot": (lambda t: t * ops.one_hot(WORDS, 7), [floats(7)]),
    "top_k": (lambda t: ops.top_k(t, 3)[0], [np.round(floats(4, 9))]),
    "concatenate": (lambda a, b: ops.concatenate([a, b], 1), [floats(2, 3, 2), floats(2, 1, 2)]),
    "stack": (lambda a, b: ops.stack([a, b], 2), [floats(2, 3), floats(2, 3)]),
    "split": (lambda a: ops.split(a, [1, 2], 1)[1] * 2, [floats(4, 3)]),
    "slice": (lambda a: a[1:5:2, ::-1] * 2, [floats(6, 5)]),
    "pad": (lambda a: ops.pad(a, ((1, 2), (0, 1)), 3.0), [floats(2, 3)]),
    "tile": (lambda a: ops.tile(a, (2, 3)), [floats(2, 3)]),
    "cumsum": (lambda a: ops.cumsum(a, 1, reverse=True), [floats(3, 5, 2)]),
    "remainder": (lambda a, b: a % b + a // b, [floats(20) * 4, floats(20)]),
    "logic": (
        lambda a: ops.where(
            ops.logical_xor(ops.isnan(a), ops.logical_or(WORDS, a > 0)) & ops.isfinite(a), a, 1.0
        ),
        [floats(2, 3)],
    ),
    "bits": (lambda a: a * ops.cast((~WORDS & 5) ^ (WORDS | 8), "float32"), [floats(2, 3)]),
    "sums of long axes": (lambda a: ops.sum(a, 0) + ops.mean(a), [floats(5000, 3)]),
    "largest of long axes": (lambda a: ops.max(a, 0) - ops.min(a), [floats(9001, 2)]),
    "layer_norm": (lambda a: ops.layer_norm(a), [floats(4, 300)]),
    "batch norm": (lambda a: ops.normalize(a, (0, 1, 2)), [IMAGES]),
    "group_norm": (lambda a: ops.group_norm(a, 2), [IMAGES]),
    "conv2d": (lambda a, k: ops.conv2d(a, k, 2, "same"), [IMAGES, floats(3, 2, 4, 5)]),
    "conv2d 1x1": (lambda a, k: ops.conv2d(a, k), [IMAGES, floats(1, 1, 4, 3)]),
    "conv2d of groups": (
        lambda a, k: ops.conv2d(a, k, 1, ((1, 0), (2, 1)), dilation=2, groups=2),
        [IMAGES, floats(2, 3, 2, 6)],
    ),
    "max_pool2d": (lambda a: ops.max_pool2d(a, 3, 2, "same"), [WITH_TIES]),
    "average_pool2d": (lambda a: ops.average_pool2d(a, (2, 3), 2, "same"), [IMAGES]),
    "attention": (
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, causal=True),
        [floats(2, 3, 5, 4), floats(2, 3, 5, 4), floats(2, 3, 5, 4)],
    ),
}


def computed(device: str, case: str) -> list[np.ndarray]:
    """Return an operator's value, and the gradients of its weighted sum, on a device."""
    function, arrays = CASES[case]
    strategy = ar.MirroredStrategy([device])
    with strategy.scope():
        variables = [ar.Variable(each, name=f"v{i}") for i, each in enumerate(arrays)]

    @ar.function
    def step() -> Any:
        value = function(*variables)
        size = int(np.prod(value.shape))
        weights = np.cos(np.arange(size, dtype=np.float32)).reshape(value.shape)
        return value, *ar.gradients(ops.sum(value * weights), variables)

    return [np.asarray(each.values[0]) for each in strategy.run(step)]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_a_cpu(case: str) -> None:
    for here, there in zip(computed("GPU:0", case), computed("CPU:0", case), strict=True):
        np.testing.assert_allclose(here, there, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", ["conv2d", "conv2d of groups"])
def test_convolutions_of_some_images_at_a_time(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allreduce.devices.cuda.kernels.images._MOST_COLUMNS", 20000)
    test_values_and_gradients_are_those_of_a_cpu(case)


def test_random_numbers_are_those_of_a_cpu() -> None:
    def draw(x: Any) -> Any:
        shape = (x.shape[0], 5)
        return (
            ops.uniform(shape, -1, 2, seed=3),
            ops.normal(shape, 1, 2, seed=4, dtype="float64"),
            ops.permutation(11, seed=5),
        )

    x = np.zeros((7, 1), np.float32)
    found = [ar.MirroredStrategy([d]).run(ar.function(draw), (x,)) for d in ("GPU:0", "CPU:0")]
    for here, there in zip(*found, strict=True):
        np.testing.assert_allclose(here.values[0], there.values[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: ops.embedding(x, np.array([1, 3, 0])), "index at place 1"),
        (lambda x: ops.take(x, np.array([-4])), "index at place 0"),
        (lambda x: ops.one_hot(np.array([0, 0, -1]), 3) * x, "label in row 2"),
    ],
)
def test_an_index_out_of_range_is_reported_with_its_place(function: Any, message: str) -> None:
    strategy = ar.MirroredStrategy(["GPU:0"])
    with strategy.scope():
        table = ar.Variable(floats(3, 3), name="table")
    with pytest.raises(ar.UsageError, match=message):
        np.asarray(strategy.run(ar.function(lambda: function(table))).values[0])
    strategy.run(ar.function(lambda: table + 1)).values[0]  # and the next step works


def test_types_without_a_kernel_are_refused_with_the_users_line() -> None:
    strategy = ar.MirroredStrategy(["GPU:0"])
    x = np.ones((2, 3), np.uint8)
    with pytest.raises(ar.UnsupportedError, match=r"^operator 'add': .*add_u8'.*CPU:0") as caught:
        strategy.run(ar.function(lambda x: x + x), (x,))
    assert "operator 'add' at" in caught.value.__notes__[0]
    assert "test_operators.py" in caught.value.__notes__[0]


@pytest.fixture
def tf32() -> Iterator[None]:
    ar.config.set_tf32(True)
    yield
    ar.config.set_tf32(False)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("case", ["attention", "conv2d of groups"])
def test_tf32_rounds_the_operands_of_products(case: str) -> None:
    assert ar.config.get_tf32()
    pairs = zip(computed("GPU:0", case), computed("CPU:0", case), strict=True)
    largest = max(float(np.abs(here - there).max()) for here, there in pairs)
    assert 1e-5 < largest < 2e-2


def test_a_kernel_that_does_not_compile_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in modules._FOLDERS[1].iterdir():
        (tmp_path / part.name).write_text(part.read_text())
    wrong = (tmp_path / "random.cu").read_text().replace("struct Words {", "struct Words { int 5;")
    (tmp_path / "random.cu").write_text(wrong)
    line = next(i for i, text in enumerate(wrong.splitlines(), 1) if "int 5;" in text)
    monkeypatch.setattr(modules, "_FOLDERS", (tmp_path,))
    monkeypatch.setattr(modules, "_functions", {})
    monkeypatch.setattr(modules, "_modules", {})
    modules._compiled.cache_clear()
    strategy = ar.MirroredStrategy(["GPU:0"])
    with pytest.raises(ar.InternalError, match=rf"kernels/cuda/random.cu[:(]{line}\b") as caught:
        strategy.run(ar.function(lambda: ops.uniform((3,))))
    assert "operator 'uniform' at" in caught.value.__notes__[0]
    assert "test_operators.py" in caught.value.__notes__[0]
    modules._compiled.cache_clear()


def test_all_operators_have_a_kernel() -> None:
    # Which passes make on CPUs only, and rows of tables on parameter servers.
    of_cpus = ("fused", "lookup_rows", "keep_row_gradients")
    for name in op_table.names():
        op = op_table.lookup(name)
        assert op.runs_on("GPU") or op.host or op.users or name in of_cpus, name
