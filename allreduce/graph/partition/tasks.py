"""Split a program that spans several tasks into one part per task."""

from __future__ import annotations

from dataclasses import dataclass

from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Node
from allreduce.graph.partition.partition import task_of
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.schedule import bind


@dataclass(frozen=True, slots=True)
class Part:
    """One task's part of a program.

    Attributes:
        program: The part; it exchanges values with the others through a rendezvous.
        feeds: The indices of the whole program's inputs that it takes.
        fetches: The indices of the whole program's outputs that it returns.
    """

    program: Program
    feeds: tuple[int, ...]
    fetches: tuple[int, ...]


def split(program: Program) -> dict[DeviceName, Part]:
    """Split a program by task.

    The parts keep the whole program's order. Every receive follows its send in that order, and each
    task runs its part in order, so tasks cannot deadlock.
    """
    issued = [each.node for each in program.instructions]
    tasks = dict.fromkeys(task_of(node) for node in (*program.given.values(), *issued))
    return {task: _part(program, issued, task) for task in tasks}


def _part(program: Program, issued: list[Node], task: DeviceName) -> Part:
    own = [node for node in issued if task_of(node) == task]
    feeds = [n for n, i in enumerate(program.inputs) if task_of(program.given[i]) == task]
    fetches = [n for n, node in enumerate(program.outputs) if task_of(node) == task]
    inputs = tuple(program.inputs[n] for n in feeds)
    outputs = tuple(program.outputs[n] for n in fetches)
    # Constants are made wherever they are read.
    needed = {*inputs, *(i for node in own for i in node.inputs), *(node.id for node in outputs)}
    given = {i: node for i, node in program.given.items() if i in needed}
    part = Program(bind(own, given), given, inputs, outputs)
    part.check()
    return Part(part, tuple(feeds), tuple(fetches))
