"""Run a scan: repeat the program of its body, with the carry in two alternating buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allreduce.graph.core.node import Node
from allreduce.graph.core.spec import Spec
from allreduce.graph.execute.frame import Frame, Step
from allreduce.graph.trace.subgraph import Body, results_read


class ScanLoop:
    """One scan of a frame.

    The carry alternates between two buffers, or moves through one buffer per iteration if the
    carry before each iteration is a result. An iteration never writes to the buffer that it reads.

    Attributes:
        nbytes: Bytes of the scan's buffers, without the body's frame.
    """

    def __init__(self, frame: Frame, node: Node, inner: Frame, steps: Sequence[Step]) -> None:
        body: Body = node.attrs["body"]
        self._frame, self._node, self._body = frame, node, body
        self._inner, self._steps = inner, steps
        nodes = (each.node for each in frame.program.instructions)
        asked = results_read(nodes).get(node.id, ())
        self._carried = [
            self._buffer(body.specs[i], body.length + 1 if kept in asked else 2)
            for i, kept in zip(range(body.carries), body.kept, strict=True)
        ]
        self._made = {i: self._buffer(body.specs[i]) for i in body.made}
        buffers = (*self._carried, *self._made.values())
        self.nbytes = sum(buffer.nbytes for buffer in buffers)

    def _buffer(self, spec: Spec, several: int | None = None) -> np.ndarray:
        shape = self._frame.sizes(spec.shape)
        return np.empty(shape if several is None else (several, *shape), spec.dtype)

    def release(self) -> None:
        """Free all memory; the loop cannot run again."""
        vars(self).clear()

    def result(self, index: int) -> np.ndarray:
        """Return the array that holds a result after the loop has run."""
        body = self._body
        if index in self._made:
            return self._made[index]
        if index < body.carries:
            buffer = self._carried[index]
            return buffer[body.length % len(buffer), ...]
        before = self._carried[body.kept.index(index)][:-1]
        return before[::-1] if body.reverse else before

    def run(self) -> None:
        """Run all iterations."""
        body, values = self._body, self._inner.values
        given = [self._frame.values[i] for i in self._node.inputs]
        inputs, outputs = body.graph.inputs, body.graph.outputs
        behind = body.carries + body.elements
        carries = list(zip(inputs, self._carried, outputs, strict=False))
        elements = list(zip(inputs, given, strict=True))[body.carries : behind]
        made = list(zip(outputs[body.carries :], self._made.values(), strict=True))
        self._inner.info = self._frame.info
        values.update(zip(inputs[behind:], given[behind:], strict=True))
        for (_, buffer, _), value in zip(carries, given, strict=False):
            buffer[0] = value
        for i in range(body.length):
            t = body.length - 1 - i if body.reverse else i
            for place, buffer, _ in carries:
                values[place] = buffer[i % len(buffer), ...]
            for place, array in elements:
                values[place] = array[t, ...]
            for step in self._steps:
                step()
            for _, buffer, place in carries:
                buffer[(i + 1) % len(buffer)] = values[place]
            for place, array in made:
                array[t] = values[place]
        for place in inputs:  # a batch may be large, and belongs to the caller
            values.pop(place, None)
