"""`ar.scan`: apply a function to each element of a sequence, with gradients.

One node repeats the graph of an iteration, followed by nodes for its results. The interface is that
of `jax.lax.scan`. The gradient is a scan in reverse order that recomputes each iteration from the
carry before it, so that only the carries are stored. Source: Griewank and Walther, Evaluating
Derivatives (2nd ed., SIAM 2008), section 12.1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allreduce.devices.integers import integer, switch
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.autodiff.gradient import differentiate
from allreduce.graph.core import pytree
from allreduce.graph.core.node import Graph
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Spec, show
from allreduce.graph.core.tensor import Tensor, TracedTensor
from allreduce.graph.ops import functions
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.subgraph import HANDLE, Body, BodyTrace, record
from allreduce.graph.trace.trace import Trace, current_trace, recording
from allreduce.keywords import explain

Step = Callable[[Any, Any], tuple[Any, Any]]


@explain()
def scan(
    fn: Step, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Carry a value through the steps of a sequence: `carry, ys[t] = fn(carry, xs[t])`.

    Inside `ar.function` the step is traced once and repeated when the function runs; outside of it,
    and where functions run eagerly, it runs at once, step by step.

    Args:
        fn: Takes the carry and a step's elements; gives the next carry, of the same structure,
            shapes and dtypes, and the step's results, or None. It may read variables and tensors
            from outside. It cannot change variables, draw random numbers, or exchange values with
            other replicas.
        init: The first carry: a tensor, or tuples, lists, dicts and dataclasses of them.
        xs: Tensors `(length, …)`, in any structure; None if the steps take no elements.
        length: How many steps there are; needed where `xs` does not say.
        reverse: Whether to go from the last elements to the first.

    Returns:
        The last carry, and the results of all steps, stacked along a new first axis, `(length, …)`.

    Raises:
        ShapeError: The carry changes its shape, or tensors in `xs` differ in length.
        UsageError: The carry changes its structure or dtype, the number of steps is not known, or
            `fn` does what it cannot.
    """
    if not callable(fn):
        raise UsageError(f"{users_line()}: ar.scan takes a function (carry, x), not {fn!r:.60}")
    reverse = switch("ar.scan: reverse", reverse)
    carry, elements = (pytree.map_leaves(_tensor, each) for each in (init, xs))
    steps = _length(elements, length)
    trace = current_trace()
    if trace is not None and trace.has_values:
        trace = None  # so that the steps' values are there, too
    if trace is None and steps:
        return _run_now(fn, carry, elements, range(steps)[::-1] if reverse else range(steps))
    graph, captured, results = _step_of(trace or Trace(), fn, carry, elements)
    if trace is None:
        return carry, _map(lambda y: functions.zeros((0, *y.shape), y.dtype), results)
    every = [*_leaves(carry), *_leaves(elements)]
    body = Body.of(graph, len(_leaves(carry)), len(_leaves(elements)), steps, reverse)
    rest = iter(record(trace, body, [*every, *captured]))
    return _map(lambda _: next(rest), carry), _map(lambda _: next(rest), results)


def _tensor(leaf: Any) -> Tensor | None:
    return None if leaf is None else as_tensor(leaf)


def _map(function: Callable[[Any], Any], structure: Any) -> Any:
    return pytree.map_leaves(lambda leaf: None if leaf is None else function(leaf), structure)


def _leaves(structure: Any) -> list[TracedTensor]:
    return [leaf for leaf in pytree.leaves(structure) if leaf is not None]


def _length(elements: Any, length: int | None) -> int:
    """Read the number of steps."""
    found = length
    if found is not None:
        found = integer(f"{users_line()}: the length of a scan", found, 0)
    for tensor in _leaves(elements):
        size = tensor.shape[0] if tensor.ndim else None
        if not isinstance(size, int):
            raise ShapeError(
                f"{users_line()}: ar.scan goes along the first axis, whose size has to be known: "
                f"{show(tensor.shape)}; transpose a batch of sequences to (length, batch, …)"
            )
        if found is not None and size != found:
            raise ShapeError(f"{users_line()}: ar.scan of lengths {found} and {size} together")
        found = size
    if found is None:
        raise UsageError(f"{users_line()}: ar.scan without xs needs length=, a number of steps")
    return found


def _run_now(fn: Step, carry: Any, elements: Any, order: Sequence[int]) -> tuple[Any, Any]:
    results: dict[int, Any] = {}
    for t in order:
        given = _called(fn, carry, _map(operator.itemgetter(t), elements))
        after, results[t] = (pytree.map_leaves(_tensor, each) for each in given)
        _check_carry(carry, after)
        carry = after
    rows = [_leaves(results[t]) for t in sorted(results)]
    stacked = iter([functions.stack(column) for column in zip(*rows, strict=True)])
    return carry, _map(lambda _: next(stacked), results[0])


def _step_of(
    trace: Trace, fn: Step, carry: Any, elements: Any
) -> tuple[Graph, list[TracedTensor], Any]:
    """Record a step; return it with its outer inputs, and the results of `fn`."""
    inner = BodyTrace(trace)
    with recording(inner):
        before = _map(lambda x: inner.placeholder(x.spec, "carry"), carry)
        element = _map(lambda x: inner.placeholder(Spec(x.shape[1:], x.dtype), "xs"), elements)
        given = _called(fn, before, element)
        after, results = (_map(inner.value, each) for each in given)
    _check_carry(carry, after)
    graph = inner.finish([*_leaves(after), *_leaves(results)])
    return graph, inner.captured, results


def _called(fn: Step, carry: Any, element: Any) -> tuple[Any, Any]:
    given = fn(carry, element)
    if not isinstance(given, tuple) or len(given) != 2:
        raise UsageError(
            f"{users_line()}: the function of ar.scan returns (carry, results), not "
            f"{given!r:.60}; (carry, None) if a step has no result"
        )
    return given


def _check_carry(before: Any, after: Any) -> None:
    """Refuse a carry that is not of the same structure, shapes and dtypes after a step."""
    if pytree.treedef(before) != pytree.treedef(after):
        raise UsageError(
            f"{users_line()}: the function of ar.scan got a carry {pytree.treedef(before)} and "
            f"returned one of another structure, {pytree.treedef(after)}"
        )
    every = zip(pytree.paths(before), pytree.leaves(before), pytree.leaves(after), strict=True)
    for path, old, new in every:
        if getattr(old, "spec", None) != getattr(new, "spec", None):
            where = "".join(f"[{key!r}]" for key in path)
            shown = [getattr(each, "spec", None) for each in (old, new)]
            kind = UsageError if None in shown or old.shape == new.shape else ShapeError
            raise kind(
                f"{users_line()}: the carry{where} of ar.scan starts as {shown[0]}, and a step "
                f"makes it {shown[1]}; start with a value like the steps'"
            )


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
        """Compute a step again, and the gradients of its float inputs, by their places."""
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


# Run by `allreduce/graph/execute/scan_loop.py`: the host repeats the body, in its
# own memory.
register("scan", lambda *_: HANDLE, gradient=_gradient, kind="loop", host=True)
register(
    "scan_result",
    lambda _, attrs: attrs["spec"],
    gradient=lambda dy, _y, _x, attrs: [_Parts({attrs["index"]: dy})],
    kind="loop",
    host=True,
)
