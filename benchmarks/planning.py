"""Time what a step costs before it runs: trace, gradient, placement, passes, partition, schedule.

    python benchmarks/planning.py

A deep network of element-wise and matrix operators on two devices, of about 1,000 to 10,000 nodes.
What one node costs shows whether times grow as the nodes do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import Row, summarize, write

import allreduce as ar
from allreduce.devices import DeviceName
from allreduce.graph import passes
from allreduce.graph.gradient import backward
from allreduce.graph.node import Graph
from allreduce.graph.partition import partition
from allreduce.graph.placement import place
from allreduce.graph.schedule import schedule
from allreduce.graph.spec import BATCH, Spec
from allreduce.graph.tensor import TracedTensor
from allreduce.graph.trace import Trace, recording

SIZES = (1000, 2000, 5000, 10_000)
DEVICES = [DeviceName.parse(f"CPU:{index}").complete() for index in range(2)]
RESULTS = Path(__file__).parent / "results"
TOTAL = "all of it"
_NODES_PER_LAYER = 24  # about; of forward and backward together


def record(layers: int) -> Graph:
    """Trace a network of so many layers, and its gradients."""
    trace = Trace()
    with recording(trace):
        x: Any = trace.placeholder(Spec((BATCH, 16), np.dtype(np.float32)), "x", varies=True)
        w = trace.placeholder(Spec((16, 16), np.dtype(np.float32)), "w")
        h = x
        for layer in range(layers):
            with ar.device(f"CPU:{layer * 2 // layers}"):
                h = ar.ops.relu(h @ w * 0.5 + 1.0) - ar.ops.tanh(h)
        gradients = backward(ar.ops.sum(h), [w, x], 1.0)
        outputs = [each for each in gradients if isinstance(each, TracedTensor)]
    return trace.finish(outputs)


def stages(layers: int) -> tuple[int, dict[str, float]]:
    """Do everything once; returns the number of nodes, and the seconds of each stage."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start
        return result

    graph = timed("trace and gradient", lambda: record(layers))
    placed, _ = timed("placement", lambda: place(graph, DEVICES[0], DEVICES))
    optimized = timed("passes", lambda: passes.order_reads(passes.optimize(placed)))
    cut = timed("partition", lambda: partition(optimized))
    program = timed("schedule", lambda: schedule(cut))
    timed("buffers", lambda: passes.plan_buffers(program))
    return len(graph.nodes), {TOTAL: sum(seconds.values()), **seconds}


def main() -> None:
    """Measure all sizes, print a table, and write it."""
    parser = argparse.ArgumentParser(description="what a step costs before it runs")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "planning")
    options = parser.parse_args()
    rows: list[Row] = []
    for size in SIZES:
        found = [stages(size // _NODES_PER_LAYER) for _ in range(options.runs)]
        nodes = found[0][0]
        times = {name: [seconds[name] for _, seconds in found] for name in found[0][1]}
        rows += summarize(f"{nodes} nodes", times, baseline=TOTAL)
        each = statistics.median(times[TOTAL]) / nodes
        print(f"{nodes} nodes: {each * 1e6:.0f} µs each")
    write(rows, options.out, "What a step costs before it runs")


if __name__ == "__main__":
    main()
