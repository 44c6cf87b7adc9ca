"""Split a graph that spans several tasks into one part per task."""

from __future__ import annotations

from dataclasses import dataclass, replace

from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.partition.partition import ANYWHERE, partition_tasks, task_of


@dataclass(frozen=True, slots=True)
class Part:
    """One task's part of a graph.

    Attributes:
        graph: The part; it exchanges values with the others through a rendezvous.
        feeds: The indices of the whole graph's inputs that it takes.
        fetches: The indices of the whole graph's outputs that it returns.
    """

    graph: Graph
    feeds: tuple[int, ...]
    fetches: tuple[int, ...]


def split(graph: Graph) -> dict[DeviceName, Part]:
    """Split a placed graph by task, and insert the transfers between its parts.

    Each task makes its transfers in their order in the whole graph. A receive follows its send in
    that order and a send never blocks, so tasks cannot deadlock, whatever order each of them gives
    to the rest of its part.
    """
    whole = partition_tasks(graph)
    placed = [node for node in whole.nodes if node.op not in ANYWHERE]
    placed += [whole.nodes[i] for i in whole.outputs]
    return {task: _part(whole, task) for task in dict.fromkeys(map(task_of, placed))}


def task_of_device(name: DeviceName) -> DeviceName:
    """Return the task of a device."""
    return DeviceName(job=name.job, replica=name.replica, task=name.task)


def task_name(task: DeviceName) -> str:
    """Return a task's name for messages and keys: "/job:ps/task:0"."""
    return f"/job:{task.job}/task:{task.task}"


def _part(whole: Graph, task: DeviceName) -> Part:
    needed = {node.id for node in whole.nodes if _belongs_to(node, task)}
    # Constants are made wherever they are read.
    needed.update(i for node in whole.nodes if node.id in needed for i in node.inputs)
    rewriter = Rewriter(whole)
    effects: list[int] = []
    transfers: list[int] = []
    home = replace(task, kind="CPU", index=0)
    for node in whole.nodes:
        if node.id not in needed:
            continue
        if not _belongs_to(node, task):
            rewriter.keep(node, device=home)
            continue
        is_transfer = node.op in ("send", "receive")
        earlier = tuple(transfers[-1:]) if is_transfer else ()
        known = tuple(rewriter.moved[i] for i in node.control if i in rewriter.moved)
        kept = rewriter.keep(node, control=tuple(dict.fromkeys((*known, *earlier))))
        if is_transfer:
            transfers.append(kept)
        if is_transfer or node.id in whole.effects:
            effects.append(kept)
    feeds = [n for n, i in enumerate(whole.inputs) if i in rewriter.moved]
    fetches = [n for n, i in enumerate(whole.outputs) if _belongs_to(whole.nodes[i], task)]
    graph = Graph(
        tuple(rewriter.nodes),
        tuple(rewriter.moved[whole.inputs[n]] for n in feeds),
        tuple(rewriter.moved[whole.outputs[n]] for n in fetches),
        tuple(effects),
    )
    return Part(graph, tuple(feeds), tuple(fetches))


def _belongs_to(node: Node, task: DeviceName) -> bool:
    return task_of(node) == task
