"""Collectives and updates of eager steps: each runs as a separate program on all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from allreduce.graph import passes
from allreduce.graph.consistency.rank_check import Facts
from allreduce.graph.core.host_future import arrived
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.spec import Spec
from allreduce.graph.execute.executor import Executor
from allreduce.graph.partition.partition import partition
from allreduce.graph.schedule.schedule import schedule
from allreduce.graph.trace.replica import StepInfo
from allreduce.graph.trace.subgraph import joins_rows
from allreduce.graph.update.arena_plan import ArenaPlan
from allreduce.graph.update.arenas import plan_for, publish_iterations
from allreduce.graph.update.program_check import StepDigest, compare
from allreduce.graph.update.update import LocalReplicas

# Of each local replica: the values that an operation reads, and the step's moment.
Brought = Sequence[tuple[list[np.ndarray], StepInfo]]


def exchange(
    host: LocalReplicas, node: Node, specs: Sequence[Spec], summary: Facts | None, brought: Brought
) -> list[np.ndarray]:
    """Run a collective; returns its value on each local replica."""
    graph = _alone(node, specs)
    if summary is not None:
        rows_known = all(info.rows_per_replica is not None for _, info in brought)
        compare(host, StepDigest(summary, joins_rows(graph.nodes)), rows_known)
    graph = replace(graph, outputs=(len(specs),))
    return [value for (value,) in _run(host, graph, [], None, brought)]


def update(
    host: LocalReplicas, node: Node, specs: Sequence[Spec], summary: Facts | None, brought: Brought
) -> None:
    """Reduce gradients over all replicas, and update the variables."""
    assert node.device is not None, node
    plan = plan_for(host, node.attrs["rule"], node.attrs["variables"], node.device)
    host.check_update(plan.check)
    plan.take_over()
    graph = _alone(node, specs)
    graph = replace(graph, effects=(len(specs),))
    graph = passes.bucket(graph, [plan], host.num_replicas_in_sync)
    rule, accumulation = node.attrs["rule"], plan.accumulation
    accumulation.begin(rule.gradient_accumulation if node.inputs else 0)
    try:
        _run(host, graph, [plan], summary, brought)
    except BaseException:
        accumulation.discard()
        raise
    accumulation.end()
    publish_iterations(rule)


def _alone(node: Node, specs: Sequence[Spec]) -> Graph:
    """Make a graph in which the node reads placeholders."""
    count = len(specs)
    fed = tuple(
        Node(i, "placeholder", (), {"name": f"input {i}", "varies": True}, spec, node.device)
        for i, spec in enumerate(specs)
    )
    inputs = tuple(range(count))
    return Graph((*fed, replace(node, id=count, inputs=inputs, control=())), inputs)


def _run(
    host: LocalReplicas,
    graph: Graph,
    plans: Sequence[ArenaPlan],
    summary: Facts | None,
    brought: Brought,
) -> list[list[np.ndarray]]:
    program = schedule(partition(graph))  # which copies what devices compute with

    def run(index: int) -> list[np.ndarray]:
        arenas = {id(plan): plan.arenas[index] for plan in plans}
        feeds, info = brought[index]
        executor = Executor(program, host.replicas[index], arenas, summary)
        try:
            # A replica without samples contributes zeros: it needs no null program.
            return [arrived(each) for each in executor.run(feeds, info, batch=False)]
        finally:
            executor.release()

    return host.on_replicas(run)
