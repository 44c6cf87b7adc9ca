"""What operators say when used wrongly."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce.errors import UsageError
from allreduce.graph.ops import functions as ops

untyped: Any = ops  # for calls that mypy would refuse

BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.add(np.ones((2, 3)), np.ones((2, 4))), r"\(2, 3\) and \(2, 4\)"),
    (lambda: np.ones((2, 3)) @ ops.ones((2, 3), "float64"), r"\(2, 3\) and \(2, 3\)"),
    (lambda: ops.matmul(2.0, np.ones(3)), r"\(\) and \(3,\)"),
    (lambda: ops.reshape(np.ones((2, 3)), (4, -1)), r"\(2, 3\) to \(4, -1\)"),
    (lambda: ops.reshape(np.ones((2, 3)), (-1, -1)), "only one size"),
    (lambda: ops.matmul(np.ones(3), np.ones((4, 4))), r"shapes \(3,\) and \(4, 4\) .* 3 and 4"),
    (lambda: ops.matmul(np.ones((4, 2)), np.ones(4)), r"shapes \(4, 2\) and \(4,\) .* 2 and 4"),
    (lambda: ops.squeeze(np.ones((2, 3)), 1), r"squeeze of \(2, 3\): axis 1 is not of size 1"),
    (lambda: ops.split(np.ones((2, 3)), 2, 1), r"split of \(2, 3\): axis 1 cannot be cut into 2"),
    (lambda: ops.transpose(np.ones((2, 3)), (0, 0)), r"transpose of \(2, 3\): \(0, 0\) are not"),
    (lambda: ops.broadcast_to(np.ones((2, 3)), (2, 4)), r"\(2, 3\).*\(2, 4\)"),
    (lambda: ops.sum_to(np.ones((2, 3)), (2, 4)), r"\(2, 3\) and \(2, 4\)"),
    (lambda: ops.sum(np.ones((2, 3)), axis=2), r"sum of \(2, 3\): axis 2"),
    (lambda: ops.max(np.ones((2, 0)), axis=1), r"\(2, 0\) has nothing along"),
    (lambda: ops.argmax(np.ones((2, 0))), r"\(2, 0\) has nothing along"),
    (lambda: ops.softmax(1.0), "needs an axis"),
    (lambda: ops.softmax_cross_entropy(np.ones((2, 3)), np.ones((2, 4))), r"\(2, 3\).*\(2, 4\)"),
    (lambda: ops.sparse_softmax_cross_entropy([1, 2], np.ones((3, 4))), r"\(2,\).*\(3, 4\)"),
    (lambda: ops.sparse_softmax_cross_entropy([], np.ones((0, 0))), "integers, got float64"),
    (lambda: ops.one_hot([0.5], 3), "integers, got float64"),
    (lambda: ops.add(np.uint8(3), 300), "300"),
    (lambda: ops.subtract(True, False), "boolean subtract"),
    (lambda: ops.ones((2,)) & 1.5, "bitwise_and: .*not supported for the input types"),
    (lambda: ~ops.ones((2,)), "invert: .*not supported for the input types"),
    (lambda: ops.dropout(np.ones(3), 1.0, seed=0), r"in \[0, 1\), got 1.0"),
    (lambda: ops.where([True], np.int8(1), 1000), "1000"),
    (lambda: ops.pad(np.ones(3, np.uint8), 1, -1), "pad: .*-1 out of bounds for uint8"),
    (lambda: ops.full((2,), 300, np.uint8), "full: .*300 out of bounds for uint8"),
    (lambda: ops.concatenate([np.ones((3, 4)), np.ones(3)], 1), r"\(3, 4\) and \(3,\) differ"),
    (lambda: ops.embedding(3.0, [0]), r"a table \(rows, …\), not a scalar"),
    (lambda: untyped.transpose(np.ones((2, 3)), (0, 5)), r"transpose of \(2, 3\): axis 5"),
    (lambda: untyped.transpose(np.ones((2, 3)), (0, -3)), r"transpose of \(2, 3\): axis -3"),
    (lambda: untyped.transpose(np.ones((2, 3)), (0, "1")), "axis '1' is no integer"),
    (lambda: untyped.sum(np.ones((2, 3)), axis="0"), r"sum of \(2, 3\): axis '0' is no integer"),
    (lambda: untyped.mean(np.ones((2, 3)), axis=0.5), "axis 0.5 is no integer"),
    (lambda: untyped.max(np.ones((2, 3)), axis=(0, -2)), r"twice in \(0, -2\)"),
    (lambda: untyped.argmax(np.ones((2, 3)), None), "needs one axis, got None"),
    (lambda: untyped.softmax(np.ones((2, 3)), (0, 1)), r"needs one axis, got \(0, 1\)"),
    (lambda: untyped.squeeze(np.ones((2, 3)), 2), r"squeeze of \(2, 3\): axis 2"),
    (lambda: untyped.expand_dims(np.ones((2, 3)), 3), r"expand_dims of \(2, 3\): axis 3"),
    (lambda: untyped.size(np.ones((2, 3)), 2), r"size of \(2, 3\): axis 2"),
    (lambda: untyped.reshape(np.ones((2, 3)), (-2, -3)), r"-1 or more, got \(-2, -3\)"),
    (lambda: untyped.reshape(np.ones((2, 3)), (2.0, 3)), r"integers, not \(2.0, 3\)"),
    (lambda: untyped.reshape(np.ones((2, 3)), (None, 3)), r"integers, not \(None, 3\)"),
    (lambda: untyped.broadcast_to(np.ones(3), (-1, 3)), r"0 or more, got \(-1, 3\)"),
    (lambda: untyped.sum_to(np.ones(3), "a"), "integers, not 'a'"),
    (lambda: untyped.zeros((-1, 3)), r"0 or more, got \(-1, 3\)"),
    (lambda: untyped.full((2,), "z"), "a number, not str 'z'"),
    (lambda: untyped.one_hot(np.zeros(0, int), 0), r"1 or more, got \(0,\)"),
    (lambda: untyped.one_hot([0], -1), r"1 or more, got \(-1,\)"),
    (lambda: untyped.one_hot([0], 3.5), r"the depth of one_hot: sizes are integers, not \(3.5,\)"),
    (lambda: untyped.one_hot([0], 3, "floaty"), "'floaty' is no dtype"),
    (lambda: untyped.cast(np.ones(2), "flot32"), "'flot32' is no dtype; did you mean 'float32'?"),
    (lambda: untyped.cast(np.ones(2), object), "not object"),
    (lambda: untyped.clip(np.ones(2), "a", 2), "a bound of clip is a number, not str 'a'"),
    (lambda: untyped.clip(np.ones(2), 0, None), "a bound of clip is a number, not NoneType"),
    (
        lambda: untyped.dropout(np.ones(2), "half"),
        "the rate of a dropout is a number, not str 'half'",
    ),
    (lambda: untyped.dropout(np.ones(2), float("nan"), seed=0), r"in \[0, 1\), got nan"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_errors_have_the_numbers_and_the_users_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert re.search(r"test_errors\.py:\d+: ", str(caught.value))


@pytest.mark.parametrize("label", [-1, 3, 2**40, 2**64 - 1])
def test_a_label_out_of_range_is_named(label: int) -> None:
    labels = np.array([0, 2, label], np.int64 if label < 2**63 else np.uint64)
    with pytest.raises(UsageError, match=rf"label {label} in row 2 .* outside of 0…2"):
        ops.sparse_softmax_cross_entropy(labels, np.zeros((3, 3)))
    with pytest.raises(UsageError, match=rf"label {label} in row 2 .* outside of 0…2"):
        ops.one_hot(labels, 3)


@pytest.mark.parametrize("take", [ops.take, ops.embedding])
def test_an_index_out_of_range_is_named_as_it_was_given(take: Callable[..., Any]) -> None:
    for index in (np.uint64(2**64 - 1), np.int8(-4), np.uint8(200)):
        said = rf"index {index} at place \(0, 1\) of .*…2, an|number {index} is outside of 0…2, the"
        with pytest.raises(UsageError, match=said):
            take(np.arange(3.0), np.array([[0, index]], index.dtype))
    np.testing.assert_array_equal(take(np.arange(3.0), np.uint8(2)).numpy(), 2.0)
    long = np.arange(1000.0)  # sizes that the indices' dtype does not hold
    np.testing.assert_array_equal(ops.take(long, np.array([-3, 7], np.int8)).numpy(), [997, 7])
