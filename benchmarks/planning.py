"""Time the preparation of a step: trace, gradient, placement, passes, partition, schedule.

    python benchmarks/planning.py

A deep network of element-wise and matrix operators on two devices, a variable that is changed again
and again, and an update of many variables in many buckets, each of about 1,000 to 10,000 nodes.
The time per node shows whether times grow linearly.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from reports.report import Row, summarize, write

import allreduce as ar
from allreduce.devices import DeviceName
from allreduce.graph import passes
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.node import Graph
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import TracedTensor
from allreduce.graph.partition.partition import partition
from allreduce.graph.placement.placement import place
from allreduce.graph.schedule.plan_buffers import plan_buffers
from allreduce.graph.schedule.schedule import schedule
from allreduce.graph.trace.trace import Trace, recording
from allreduce.reduction import ShardMode, lay_out, plan_buckets

SIZES = (1000, 2000, 5000, 10_000)
DEVICES = [DeviceName.parse(f"CPU:{index}").complete() for index in range(2)]
RESULTS = Path(__file__).parent / "results"
TOTAL = "all of it"
BUCKET = 4096  # bytes, so that an update has many
# About; of forward and backward together.
_NODES_PER_LAYER, _NODES_PER_CHANGE, _NODES_PER_VARIABLE = 24, 5, 12


class Plan:
    """How the variables of an update lie in an arena, and which of them share a bucket."""

    def __init__(self, variables: list[ar.Variable]) -> None:
        self.variables = variables
        self.layout = lay_out([(each.name, each.shape) for each in variables], np.float32)
        self.buckets = plan_buckets(self.layout, limit=BUCKET)
        self.sharded: dict[int, ShardMode] = {}
        self.wire: str | None = None


def network(trace: Trace, nodes: int) -> tuple[list[TracedTensor], list[Plan]]:
    """Record a network on two devices, and its gradients."""
    layers = nodes // _NODES_PER_LAYER
    x: Any = trace.placeholder(Spec((BATCH, 16), np.dtype(np.float32)), "x", varies=True)
    w = trace.placeholder(Spec((16, 16), np.dtype(np.float32)), "w")
    h = x
    for layer in range(layers):
        with ar.device(f"CPU:{layer * 2 // layers}"):
            h = ar.ops.relu(h @ w * 0.5 + 1.0) - ar.ops.tanh(h)
    gradients = backward(ar.ops.sum(h), [w, x], 1.0)
    return [each for each in gradients if isinstance(each, TracedTensor)], []


def changes(trace: Trace, nodes: int) -> tuple[list[TracedTensor], list[Plan]]:
    """Record a variable that is read and assigned again and again."""
    x: Any = trace.placeholder(Spec((16,), np.dtype(np.float32)), "x")
    v = ar.Variable(np.zeros(16, np.float32), name="v")
    for _ in range(nodes // _NODES_PER_CHANGE):
        v.assign(v * 0.5 + x)
    result = v * 1.0
    assert isinstance(result, TracedTensor)
    return [result], []


def update(trace: Trace, nodes: int) -> tuple[list[TracedTensor], list[Plan]]:
    """Record a network of many small variables, and the update of them all, in many buckets."""
    h: Any = trace.placeholder(Spec((BATCH, 16), np.dtype(np.float32)), "x", varies=True)
    count = nodes // _NODES_PER_VARIABLE
    variables = [ar.Variable(np.ones(16, np.float32), name=f"v{i}") for i in range(count)]
    for each in variables:
        h = ar.ops.tanh(h * each)
    ar.optim.SGD(0.1).minimize(ar.ops.sum(h, axis=1), variables)
    return [h], [Plan(variables)]


SHAPES = {"a network": network, "changes of a variable": changes, "an update": update}


def stages(shape: str, nodes: int) -> tuple[int, dict[str, float]]:
    """Do everything once; returns the number of nodes, and the seconds of each stage."""
    seconds: dict[str, float] = {}
    trace = Trace()

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start
        return result

    def record() -> tuple[Graph, list[Plan]]:
        with recording(trace):
            outputs, plans = SHAPES[shape](trace, nodes)
        return trace.finish(outputs), plans

    def rewrite(graph: Graph, plans: list[Plan]) -> Graph:
        return passes.bucket(passes.order_reads(passes.optimize(graph)), plans, replicas=2)

    graph, plans = timed("trace and gradient", record)
    placed, _ = timed("placement", lambda: place(graph, DEVICES[0], DEVICES))
    optimized = timed("passes", lambda: rewrite(placed, plans))
    cut = timed("partition", lambda: partition(optimized))
    program = timed("schedule", lambda: schedule(cut))
    timed("buffers", lambda: plan_buffers(program))
    return len(graph.nodes), {TOTAL: sum(seconds.values()), **seconds}


def main() -> None:
    """Measure all sizes, print a table, and write it."""
    parser = argparse.ArgumentParser(description="what a step costs before it runs")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "planning")
    options = parser.parse_args()
    rows: list[Row] = []
    for shape, size in itertools.product(SHAPES, SIZES):
        found = [stages(shape, size) for _ in range(options.runs)]
        nodes = found[0][0]
        times = {name: [seconds[name] for _, seconds in found] for name in found[0][1]}
        rows += summarize(f"{shape}, {nodes} nodes", times, baseline=TOTAL)
        each = statistics.median(times[TOTAL]) / nodes
        print(f"{shape}, {nodes} nodes: {each * 1e6:.0f} µs each")
    write(rows, options.out, "What a step costs before it runs")


if __name__ == "__main__":
    main()
