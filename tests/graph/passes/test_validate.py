"""What cannot be planned is refused, by name and line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from allreduce.errors import UsageError
from allreduce.graph import Tensor, Variable, function, ops
from allreduce.graph.passes import prune
from allreduce.graph.passes.validate import check_order
from tests.graph.interpret import interpret, trace_of

HERE = r"test_validate\.py:\d+"


def test_a_fetch_whose_feed_is_not_given_is_refused_with_both_lines() -> None:
    traced = trace_of(lambda x, y: (ops.exp(x), ops.log(x + y)), (2,), (2,))
    graph = replace(traced, inputs=traced.inputs[:1])
    with pytest.raises(UsageError, match=rf"{HERE}: log depends on 'x1' \(.*\), which is not fed"):
        prune(graph)
    first = replace(graph, outputs=graph.outputs[:1])
    np.testing.assert_array_equal(interpret(prune(first), [np.zeros(2, np.float32)])[0], [1, 1])


def test_an_assignment_whose_feed_is_not_given_is_refused() -> None:
    v = Variable(np.zeros(2, np.float32), name="v")

    def step(x: Tensor, y: Tensor) -> Tensor:
        v.assign(y)
        return x

    graph = trace_of(step, (2,), (2,))
    with pytest.raises(UsageError, match=rf"{HERE}: assign depends on 'x1'"):
        prune(replace(graph, inputs=graph.inputs[:1]))


def test_a_cycle_through_assignments_is_refused_by_the_variables_names() -> None:
    a, b, c = (Variable(np.zeros((), np.float32), name=name) for name in "abc")

    def step(x: Tensor) -> Tensor:
        a.assign(x + b)
        c.assign(x)
        b.assign(a * 2.0)
        return x

    graph = trace_of(step, ())
    check_order(graph)
    first = next(node for node in graph.nodes if node.op == "read")  # of b: of what comes later
    nodes = [replace(each) for each in graph.nodes]
    nodes[first.id] = replace(first, control=(graph.effects[-1],))
    with pytest.raises(UsageError, match=rf"{HERE}: read needs assign .*assignments of (.*);") as e:
        check_order(replace(graph, nodes=tuple(nodes)))
    assert "'a'" in str(e.value)
    assert "'b'" in str(e.value)


def test_two_variables_are_swapped() -> None:
    a, b = (Variable(np.float32(value), name=name) for name, value in (("a", 1), ("b", 2)))

    @function
    def swap() -> None:
        before_a, before_b = a * 1.0, b.__tensor__()
        a.assign(before_b)
        b.assign(before_a)

    swap()
    assert (float(a.numpy()), float(b.numpy())) == (2, 1)
