"""The master's work: place a client's graph on the cluster's devices, and split it by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from allreduce.cluster.spec import ClusterSpec
from allreduce.devices.names import DeviceName
from allreduce.errors import DeviceError, did_you_mean
from allreduce.graph.core.node import Graph, Rewriter
from allreduce.graph.partition.partition import task_of
from allreduce.graph.partition.tasks import Part, split, task_name, task_of_device
from allreduce.graph.passes.prune import prune
from allreduce.graph.placement.placement import place


def named_tasks(graph: Graph) -> list[DeviceName]:
    """List the tasks that a graph's devices name, without those that it leaves open."""
    devices = dict.fromkeys(node.device for node in graph.nodes if node.device is not None)
    full = [each for each in devices if each.job is not None and each.task is not None]
    return list(dict.fromkeys(replace(task_of_device(each), replica=0) for each in full))


def plan(
    graph: Graph,
    cluster: ClusterSpec,
    home: DeviceName,
    devices: Mapping[DeviceName, Sequence[DeviceName]],
) -> dict[DeviceName, Part]:
    """Place a graph and split it by task; a pure function.

    Args:
        graph: As traced; a node's device is what the scopes asked for.
        cluster: The cluster.
        home: The master's first device, for nodes that ask for none.
        devices: The devices of each known task; others are taken to have one CPU.

    Raises:
        DeviceError: A node asks for a device that the cluster does not have.
    """
    available: list[DeviceName] = []
    for job, number, _ in cluster:
        task = DeviceName(job=job, replica=0, task=number)
        available += devices.get(task) or [replace(task, kind="CPU", index=0)]
    _check_devices(graph, available)
    placed, _ = place(prune(graph), home, available)
    fed, numbers = _feed_where_read(placed)
    return {
        task: replace(part, feeds=tuple(numbers[n] for n in part.feeds))
        for task, part in split(fed).items()
    }


def _check_devices(graph: Graph, available: Sequence[DeviceName]) -> None:
    """Refuse devices that no task has; soft placement is for the devices of one process."""
    for node in graph.nodes:
        asked = node.device
        if asked is None or any(map(asked.matches, available)):
            continue
        of_task = replace(asked, kind=None, index=None)
        there = dict.fromkeys(each.local for each in available if of_task.matches(each))
        if there:
            whose = "no task of the cluster has" if asked.job is None else "that task does not have"
            found = f"{whose}; there are {', '.join(there)}"
        else:
            tasks = dict.fromkeys(map(task_name, available))
            jobs = {str(each.job) for each in available}
            hint = "" if asked.job in jobs else did_you_mean(asked.job, jobs)
            found = f"the cluster does not have; there are {', '.join(tasks)}{hint}"
        raise DeviceError(f"{node.source}: {node.op} was placed on {asked}, which {found}")


def _feed_where_read(graph: Graph) -> tuple[Graph, list[int]]:
    """Give each task that reads an input one of its own, so that the client sends it there.

    Returns:
        The graph, and the number of each of its inputs in the client's.
    """
    consumers = graph.consumers()
    rewriter = Rewriter(graph)
    copies: dict[tuple[int, DeviceName], int] = {}
    inputs: list[int] = []
    numbers: list[int] = []
    for node in graph.nodes:
        if node.id not in graph.inputs:
            task = task_of(node)
            read = tuple(copies.get((i, task), rewriter.moved[i]) for i in node.inputs)
            rewriter.keep(node, inputs=read)
            continue
        fetched = [node] if node.id in graph.outputs else []
        readers = [graph.nodes[i] for i in consumers[node.id]] or fetched  # none: it is not sent
        for task, reader in {task_of(each): each for each in reversed(readers)}.items():
            copies[node.id, task] = rewriter.keep(node, device=reader.device)
            inputs.append(copies[node.id, task])
            numbers.append(graph.inputs.index(node.id))
    return replace(rewriter.finish(), inputs=tuple(inputs)), numbers
