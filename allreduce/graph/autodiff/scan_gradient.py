"""The gradient of a scan: a scan in reverse order.

It recomputes each iteration from the carry before it, so that only the carries are stored.
Source: Griewank and Walther, Evaluating Derivatives (2nd ed., SIAM 2008), section 12.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allreduce.graph.autodiff.gradient import differentiate
from allreduce.graph.core.op_table import Attrs, Op, register
from allreduce.graph.core.spec import Spec
from allreduce.graph.core.tensor import Tensor, TracedTensor
from allreduce.graph.ops import functions
from allreduce.graph.trace.subgraph import HANDLE, Body, BodyTrace, record
from allreduce.graph.trace.trace import Trace, recording


@dataclass(frozen=True, slots=True)
class _Parts:
    """The gradients of a scan's results, by index."""

    by_index: Mapping[int, Tensor]

    def __add__(self, other: _Parts) -> _Parts:
        merged = dict(self.by_index)
        for index, dy in other.by_index.items():
            merged[index] = merged[index] + dy if index in merged else dy
        return _Parts(merged)


def _gradient(
    dy: _Parts, handle: TracedTensor, inputs: Sequence[TracedTensor], attrs: Attrs
) -> list[Tensor | None]:
    trace, body = handle.trace, attrs["body"]
    assert isinstance(trace, Trace)
    backward = _Backward(trace, handle, inputs, body, dy.by_index)
    return backward.gradients()


class _Backward:
    """Records the scan that is the gradient of another one.

    Its carry consists of the gradients of the carry and the sums of the gradients of constant
    inputs. Its elements are the carry before each iteration, the iteration's elements, and the
    gradients of the results.
    """

    def __init__(
        self,
        trace: Trace,
        handle: TracedTensor,
        inputs: Sequence[TracedTensor],
        body: Body,
        parts: Mapping[int, Tensor],
    ) -> None:
        self._trace, self._body, self._parts, self._inputs = trace, body, parts, inputs
        self._carries = range(body.carries)
        self._elements = range(body.carries, body.carries + body.elements)
        self._fixed = range(body.carries + body.elements, len(inputs))
        first = handle.id + 1  # of the results
        self._kept = [TracedTensor(trace, first + i, body.specs[i]) for i in body.kept]

    def _floats(self, places: Sequence[int]) -> list[int]:
        return [i for i in places if self._inputs[i].dtype.kind == "f"]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of each input; None for inputs that are not floats."""
        body, inputs, parts = self._body, self._inputs, self._parts
        carries, elements, fixed = map(self._floats, (self._carries, self._elements, self._fixed))
        init: list[Any] = [_or_zeros(parts.get(i), inputs[i]) for i in carries]
        init += [functions.zeros(inputs[i].shape, inputs[i].dtype) for i in fixed]
        stacked = [i for i in parts if i >= body.carries]
        xs: list[Any] = [
            *self._kept,
            *(inputs[i] for i in self._elements),
            *(parts[i] for i in stacked),
        ]
        inner = BodyTrace(self._trace)
        with recording(inner):
            before = [inner.placeholder(tensor.spec, "carry") for tensor in init]
            each = [inner.placeholder(Spec(x.shape[1:], x.dtype), "xs") for x in xs]
            given = [*each[: self._fixed.start], *(inner.value(inputs[i]) for i in self._fixed)]
            dys = dict(zip(stacked, each[self._fixed.start :], strict=True))
            found = self._step(inner, given, before[: len(carries)], dys)
            sums = [a + found[i] for a, i in zip(before[len(carries) :], fixed, strict=True)]
            outputs = [*(found[i] for i in carries), *sums, *(found[i] for i in elements)]
            graph = inner.finish([inner.value(each) for each in outputs])
        again = Body.of(graph, len(init), len(xs), body.length, not body.reverse)
        results = iter(record(self._trace, again, [*init, *xs, *inner.captured]))
        order = [*carries, *fixed, *elements]
        by_input = dict(zip(order, results, strict=False))
        return [by_input.get(i) for i in range(len(inputs))]

    def _step(
        self,
        inner: BodyTrace,
        given: Sequence[TracedTensor],
        after: Sequence[TracedTensor],
        parts: Mapping[int, TracedTensor],
    ) -> dict[int, Tensor]:
        """Compute a step again, and the gradients of its inputs that are floats, by their places.

        Args:
            inner: The trace that records it.
            given: The step's inputs.
            after: The gradients of the floats of the next carry.
            parts: The gradients of the step's results, and of the previous carry, by number.
        """
        body = self._body
        outputs = inner.copy(body.graph, given)
        ends = dict(zip(self._floats(self._carries), after, strict=True))
        ends |= {body.carries + k: parts[i] for k, i in enumerate(body.made) if i in parts}
        places = self._floats(range(len(given)))
        found = differentiate(
            [(outputs[i], seed) for i, seed in ends.items()], [given[i] for i in places]
        )
        gradients = dict(zip(places, found, strict=True))
        for place, i in enumerate(body.kept):
            if i in parts:
                gradients[place] = gradients[place] + parts[i]
        return gradients


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return functions.zeros(like.shape, like.dtype) if tensor is None else tensor


def _scan_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return HANDLE


def _result_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    spec: Spec = attrs["spec"]
    return spec


def _result_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[_Parts]:
    return [_Parts({attrs["index"]: dy})]


# The executor carries them out (`allreduce/graph/execute/loop.py`).
# The host repeats it, in its own memory.
register(Op("scan", _scan_shape, gradient=_gradient, kind="loop", host=True))
register(Op("scan_result", _result_shape, gradient=_result_gradient, kind="loop", host=True))
