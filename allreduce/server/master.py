"""The master's work: place a client's graph on the cluster's devices, and split it by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from allreduce.cluster.spec import ClusterSpec
from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Graph, Rewriter
from allreduce.graph.partition.tasks import Part, split, task_of_device
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
    placed, _ = place(prune(graph), home, available)
    return split(_feed_where_read(placed))


def _feed_where_read(graph: Graph) -> Graph:
    """Move each input to the device of its first reader, so that a client sends it there."""
    consumers = graph.consumers()
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        readers = consumers[node.id] if node.op == "placeholder" else []
        device = graph.nodes[readers[0]].device if readers else node.device
        rewriter.keep(node, device=device)
    return rewriter.finish()
