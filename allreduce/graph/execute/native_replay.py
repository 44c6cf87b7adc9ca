"""Replay a frame's steps in native code: one call runs a sequence of supported instructions.

A replay is bound to the arrays of a step that has run. Computed values stay in the frame's memory,
in an arena or in a variable. The inputs and the outputs may be new arrays in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from allreduce import _native
from allreduce.graph.core.host_future import Output
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.execute import native_lowering
from allreduce.graph.execute.frame import Frame, Step
from allreduce.graph.execute.reports import end


class NativeReplay:
    """Replays steps whose inputs have the strides and alignment of a step that has run.

    Args:
        frame: A frame with one thread and with all values of its latest step.
        moving: That step's inputs and outputs, by node.
        parts: Each instruction as a function; None if there is nothing to do.
        waits: The collectives that each instruction waits for.

    Attributes:
        steps: The functions that run all instructions, after `begin`.
        is_whole: Whether none of these runs an instruction in Python.
        step: Runs a whole step of these inputs, and returns copies of the outputs; None if it needs
            Python. It returns None where it does after all.
    """

    def __init__(
        self,
        frame: Frame,
        moving: Mapping[int, np.ndarray],
        parts: Sequence[Step | None],
        waits: Sequence[tuple[int, ...]],
    ) -> None:
        self._frame = frame
        # Views are matched to inputs by address, and inputs may overlap: use distinct memory.
        apart = {i: _dummy_like(x) for i, x in moving.items()}
        apart.update({i: apart[output] for i, output in frame.outputs.replaced.items()})
        frame.values.update(apart)
        self._bases = set(moving)
        self._moving = set(moving)  # values in memory that moves
        self._loose: set[int] = set()  # and values at a new address each time
        self._replay = _native.Replay(list(apart.values()), list(_storages(frame)))
        self.begin = self._replay.begin
        self.steps: list[Step] = []
        self._looks: list[Step] = []  # the instructions that make views of moving arrays
        nodes = [each.node for each in frame.program.instructions]
        native = [
            part is not None and self._is_native(node, part)
            for node, part in zip(nodes, parts, strict=True)
        ]
        wanted = self._wanted(nodes, native)
        self._bind(nodes, parts, waits, native, wanted)
        self.step = self._whole_step(nodes)
        for i in self._moving:  # their stand-in memory is not used any more
            frame.values.pop(i, None)

    def _whole_step(
        self, nodes: Sequence[Node]
    ) -> Callable[[list[Any]], list[Output] | None] | None:
        """Return a function that runs a step and copies its outputs; None if Python is needed.

        It returns None where a task rejects its input, so the step must be repeatable: one that
        changes nothing, and reads nothing but its inputs and variables.
        """
        frame, moving = self._frame, self._moving
        results = [node.id for node in frame.program.outputs]
        changes = any(lookup(node.op).kind not in ("compute", "source") for node in nodes)
        if not self.is_whole or changes or frame.runtime or frame.outputs.output_nodes:
            return None
        if any(i in moving or i not in frame.values for i in results):
            return None
        return partial(self._replay.step, results=[frame.values[i] for i in results])

    def _is_native(self, node: Node, part: Step) -> bool:
        """Add an instruction to the native replay; returns False if Python must run it.

        Views of arrays that stay in place exist already.
        """
        values, view = self._frame.values, lookup(node.op).view
        if node.op == "read" and not node.attrs.get("copy", False):
            return True
        if view is not None:
            return self._is_seen(node, part)
        if node.op == "read" or node.id in self._frame.outputs.arriving:
            self._loose.add(node.id)
            return False
        if self._loose.intersection(node.inputs):
            return False  # but its result stays in place
        if node.device is None or node.device.kind != "CPU":
            return False
        if self._frame.replica.guard is not None and lookup(node.op).kind == "effect":
            return False
        out = _target(self._frame, node)
        if out is None:
            return False
        return native_lowering.add(self._replay, node, out, [values[i] for i in node.inputs])

    def _is_seen(self, node: Node, look: Step) -> bool:
        """Return whether a view needs no work in a step, unless Python reads it."""
        (source,), values = node.inputs, self._frame.values
        if source in self._moving:
            look()
        view, base = values[node.id], values[source]
        if source in self._loose or (view.size and not np.may_share_memory(view, base)):
            self._loose.add(node.id)
            return False
        if source in self._moving:
            self._moving.add(node.id)
            self._looks.append(look)
        return True

    def _wanted(self, nodes: Sequence[Node], native: Sequence[bool]) -> set[int]:
        """Find the views of moving arrays that Python reads."""
        wanted = {node.id for node in self._frame.program.outputs}
        for node, is_native in zip(reversed(nodes), reversed(native), strict=True):
            if not is_native or (lookup(node.op).view is not None and node.id in wanted):
                wanted.update(node.inputs)
        return wanted & self._moving - self._bases

    def _bind(
        self,
        nodes: Sequence[Node],
        parts: Sequence[Step | None],
        waits: Sequence[tuple[int, ...]],
        native: Sequence[bool],
        wanted: set[int],
    ) -> None:
        together: list[Step] = []  # parts with one native task each
        done = 0
        self.is_whole = True
        for node, part, collectives, is_native in zip(nodes, parts, waits, native, strict=True):
            if part is None:
                continue
            in_python = not is_native or node.id in wanted
            if (collectives or in_python) and together:
                self.steps.append(self._run(done, together))
                done, together = done + len(together), []
            if collectives:
                self.steps.append(self._wait(collectives))
            if in_python:
                self.steps.append(part)
                self.is_whole = False
            elif _is_task(node):
                together.append(part)
        if together:
            self.steps.append(self._run(done, together))
        assert done + len(together) == len(self._replay), "a task for each native instruction"

    def _run(self, first: int, parts: Sequence[Step]) -> Step:
        run, last, looks = self._replay.run, first + len(parts), self._looks

        def steps() -> None:
            at = first
            while (done := run(at, last)) >= 0:
                # A task has rejected its input: run its Python part, which raises the error.
                for look in looks:
                    look()
                parts[at + done - first]()
                at += done + 1

        return steps

    def _wait(self, collectives: tuple[int, ...]) -> Step:
        frame = self._frame

        def wait() -> None:
            for each in collectives:
                end(frame, each)

        return wait


def is_replayable(fed: Mapping[int, np.ndarray], frame: Frame) -> bool:
    """Return whether no input overlaps a variable, which the step may change."""
    known = [storage[index] for storage, index in _storages(frame)]
    return not any(np.may_share_memory(x, y) for x in fed.values() for y in known)


def _dummy_like(x: np.ndarray) -> np.ndarray:
    """Return an array with the same strides and alignment in unused memory."""
    if not x.size:
        return np.empty(x.shape, x.dtype)
    first, behind = byte_bounds(x)
    memory = np.empty(behind - first, np.uint8)
    start = x.__array_interface__["data"][0] - first
    return np.ndarray(x.shape, x.dtype, memory, start, x.strides)


def _storages(frame: Frame) -> list[tuple[list[np.ndarray], int]]:
    """List the lists that hold the variables' arrays, which may be replaced between steps."""
    variables = {
        each.node.attrs["variable"]: None
        for each in frame.program.instructions
        if "variable" in each.node.attrs
    }
    return [(variable.storage, frame.replica.index) for variable in variables]


def _is_task(node: Node) -> bool:
    """Return whether a native instruction needs a task."""
    return node.op != "read" and lookup(node.op).view is None


def _target(frame: Frame, node: Node) -> np.ndarray | None:
    """Return the array that an instruction writes to, if there is just one."""
    if node.op == "store_gradient":
        return frame.gradient(node)
    if node.op == "store_count":
        return frame.arena(node).count
    if node.op == "assign":
        storage: list[np.ndarray] = node.attrs["variable"].storage
        return storage[frame.replica.index]
    return frame.values.get(node.id) if lookup(node.op).kind == "compute" else None
