"""What each task does of a program that spans several."""

from __future__ import annotations

from dataclasses import dataclass

from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Node
from allreduce.graph.partition.partition import task_of
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.schedule import bind


@dataclass(frozen=True, slots=True)
class Part:
    """One task's part.

    Attributes:
        program: What it runs; it meets the others in a rendezvous.
        feeds: Which of the whole program's inputs it is fed, by their number.
        fetches: Which of the whole program's outputs it returns.
    """

    program: Program
    feeds: tuple[int, ...]
    fetches: tuple[int, ...]


def split(program: Program) -> dict[DeviceName, Part]:
    """Split a program by task.

    The parts keep the order of the whole. As every receive comes behind its send there, and each
    task goes through its part in that order, tasks never wait for each other in a circle.
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
