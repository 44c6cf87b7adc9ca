"""Passes, placement, partition and schedule: pure plans, tested as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from allreduce.devices import DeviceName, options
from allreduce.errors import DeviceError
from allreduce.graph import Variable, device, function, minimize, ops
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.partition.partition import partition
from allreduce.graph.passes import bucket, order_reads, prune
from allreduce.graph.placement.placement import place
from allreduce.graph.schedule.empty_shard import null_program
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.schedule import schedule
from allreduce.graph.schedule.streams import stream_of
from allreduce.graph.update.update import UpdateRule
from allreduce.reduction import Bucket, Layout, ShardMode, lay_out, plan_buckets
from tests.graph.interpret import trace_of

CPUS = [DeviceName.parse(f"CPU:{index}").complete() for index in range(2)]


class Rule(UpdateRule):
    """An update rule that is never run."""

    iterations = 0

    def get_config(self) -> dict[str, Any]:
        return {}

    def native(self, header: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        return None

    def update(
        self,
        parameters: np.ndarray,
        gradients: np.ndarray,
        slots: Mapping[str, np.ndarray],
        count: np.ndarray,
        step: int,
    ) -> None:
        raise AssertionError("planned, not run")


class Plan:
    def __init__(self, variables: list[Variable], limit: int) -> None:
        self.variables = variables
        self.layout: Layout = lay_out([(v.name, v.shape) for v in variables], np.float32)
        self.buckets: tuple[Bucket, ...] = plan_buckets(self.layout, limit)
        self.sharded: dict[int, ShardMode] = {}
        self.wire: str | None = None


def _variable(name: str, *shape: int) -> Variable:
    return Variable(np.zeros(shape, np.float32), name=name)


def _ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def _two_layers(limit: int = 64) -> tuple[Graph, Plan, list[Variable]]:
    w1, w2 = _variable("w1", 4, 16), _variable("w2", 16, 3)

    def step(x: Tensor) -> Tensor:
        loss = ops.mean(ops.square(ops.relu(x @ w1) @ w2), axis=1)
        minimize(Rule(), loss, [w1, w2])
        return loss

    graph = order_reads(prune(trace_of(step, (BATCH, 4))))
    return graph, Plan([w2, w1], limit), [w1, w2]


def test_prune_drops_what_no_fetch_needs() -> None:
    graph = prune(trace_of(lambda x, y: (ops.exp(x), y * 2)[0], (2,), (2,)))
    assert _ops(graph) == ["placeholder", "placeholder", "exp"]


def test_prune_drops_the_gradient_of_the_data() -> None:
    graph, _, _ = _two_layers()
    data = graph.inputs[0]
    # Forward reads it, and the gradient of w1 through a transpose; nothing differentiates it.
    assert [graph.nodes[i].op for i in graph.consumers()[data]] == ["matmul", "transpose"]


def test_a_change_waits_for_the_readers_of_what_it_changes() -> None:
    graph, _, _ = _two_layers()
    change = next(node for node in graph.nodes if node.op == "apply_gradients")
    waited = {graph.nodes[i].op for i in change.control}
    assert {"read", "matmul", "transpose"} <= waited
    assert not any(node.attrs.get("copy") for node in graph.nodes)


def test_a_read_that_is_used_after_a_change_is_copied() -> None:
    v = _variable("v", 3)

    def step(x: Tensor) -> Tensor:
        old = v + 0.0 * x
        before = v.__tensor__()
        v.assign(old + 1)
        return before + v  # the old value and the new one

    graph = order_reads(trace_of(step, (3,)))
    reads = [node for node in graph.nodes if node.op == "read"]
    assert [node.attrs.get("copy", False) for node in reads] == [True, False]


def test_edges_grow_as_changes_do() -> None:
    def edges(changes: int) -> int:
        v = _variable("v", 3)

        def step(x: Tensor) -> Tensor:
            for _ in range(changes):
                v.assign(v * 0.5 + x)
            return v * 1.0

        return sum(len(node.control) for node in order_reads(trace_of(step, (3,))).nodes)

    assert edges(40) - edges(30) == edges(30) - edges(20)


def test_buckets_become_stores_collectives_and_updates() -> None:
    graph, plan, _ = _two_layers()
    alone = bucket(graph, [plan], replicas=1)
    assert _ops(alone).count("all_reduce_bucket") == 0
    assert _ops(alone).count("update_bucket") == len(plan.buckets) == 2
    several = bucket(graph, [plan], replicas=4)
    assert _ops(several).count("all_reduce_bucket") == 2
    assert _ops(several).count("store_gradient") == 2
    first = next(node for node in several.nodes if node.op == "all_reduce_bucket")
    assert {several.nodes[i].op for i in first.control} == {"store_gradient", "store_count"}


def test_an_update_waits_only_for_the_readers_of_its_own_bucket() -> None:
    graph, plan, (w1, _) = _two_layers()
    several = bucket(graph, [plan], replicas=2)
    updates = [node for node in several.nodes if node.op == "update_bucket"]
    for update in updates:
        reads = [several.nodes[i] for i in update.control if several.nodes[i].op == "read"]
        assert [read.attrs["variable"] for read in reads] == list(update.attrs["changes"])
    second = updates[1]
    assert second.attrs["changes"] == (w1,)
    collectives = [i for i in second.control if several.nodes[i].op == "all_reduce_bucket"]
    assert len(collectives) == 2  # its own, and the first one for the count


def _program(replicas: int) -> Program:
    graph, plan, _ = _two_layers()
    placed, _ = place(bucket(graph, [plan], replicas), CPUS[0], CPUS)
    return schedule(partition(placed))


def test_a_collective_is_issued_as_soon_as_its_gradients_are_there() -> None:
    names = [each.node.op for each in _program(2).instructions]
    first = names.index("all_reduce_bucket")
    assert "matmul" in names[first:], "the first bucket travels while the rest is computed"
    assert names[-2:] == ["update_bucket", "update_bucket"]


def test_events_are_only_between_streams_and_none_is_waited_for_twice() -> None:
    program = _program(2)
    for instruction in program.instructions:
        for i in instruction.waits:
            assert program.instructions[i].stream != instruction.stream
            assert program.instructions[i].signals
    updates = [each for each in program.instructions if each.node.op == "update_bucket"]
    # The first update waits for the first collective, so the second one only for its own.
    assert [len(each.waits) for each in updates] == [1, 1]


def test_a_copy_runs_on_the_stream_of_the_end_that_does_it() -> None:
    names = [f"/job:worker/replica:0/task:0/{each}" for each in ("CPU:0", "GPU:0", "GPU:1")]
    host, one, other = names

    def stream(op: str, source: str, destination: str, across: bool = False) -> str:
        attrs = {"source": source, "destination": destination, "across": across}
        device = DeviceName.parse(source if op == "send" else destination)
        return str(stream_of(Node(0, op, (), attrs, Spec((), np.dtype(np.int64)), device)))

    for op in ("send", "receive"):  # one stream for both keeps their order
        assert stream(op, host, one) == "GPU:0 host-to-device"
        assert stream(op, one, host) == "GPU:0 device-to-host"
        assert stream(op, one, other) == "GPU:0 device-to-device"
        assert stream(op, host, host.replace("CPU:0", "CPU:1")) == "CPU:0 device-to-device"
    there = other.replace("task:0", "task:1")
    assert stream("send", one, there, across=True) == "GPU:0 device-to-host"
    assert stream("receive", one, there, across=True) == "GPU:1 host-to-device"


def test_devices_have_streams_of_their_own() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        with device("CPU:1"):
            there = ops.exp(x)
        with device("CPU:0"):
            here = ops.tanh(x)
            return here, ops.log(there)

    placed, _ = place(trace_of(fn, (2,)), CPUS[0], CPUS)
    program = schedule(partition(placed))
    streams = {each.node.op: str(each.stream) for each in program.instructions}
    assert streams["exp"] == "CPU:1 compute"
    assert streams["tanh"] == "CPU:0 compute"
    # There and back, and nothing that both devices' work waits for.
    assert sum(len(each.waits) for each in program.instructions) == 3
    assert str(program).splitlines()[-2].startswith("   6 CPU:0 compute          %")


def test_the_null_program_has_the_same_collectives_and_updates() -> None:
    program = _program(2)
    null = null_program(program)
    null.check()
    kept = ("all_reduce_bucket", "update_bucket")
    assert [i.node.op for i in null.instructions if i.node.op in kept] == [
        i.node.op for i in program.instructions if i.node.op in kept
    ]
    assert not any(i.node.op == "matmul" for i in null.instructions)
    assert [i.node.op for i in null.instructions].count("clear_gradients") == 1


def test_placement_follows_scopes_then_inputs_then_the_replica() -> None:
    def fn(x: Tensor) -> Tensor:
        with device("CPU:1"):
            y = ops.exp(x)
        return ops.log(y) + ops.tanh(x)

    placed, log = place(trace_of(fn, (2,)), CPUS[0], CPUS)
    where = {node.op: node.device for node in placed.nodes}
    assert where["exp"] == CPUS[1]
    assert where["log"] == CPUS[1]
    assert where["tanh"] == CPUS[0]
    assert [row.reason for row in log if row.op == "log"] == ["its inputs are there"]


def test_one_transfer_per_tensor_and_destination() -> None:
    def fn(x: Tensor) -> Tensor:
        y = ops.exp(x)
        with device("CPU:1"):
            return ops.log(y) + ops.sqrt(y)

    placed, _ = place(trace_of(fn, (2,)), CPUS[0], CPUS)
    cut = partition(placed)
    assert _ops(cut).count("send") == _ops(cut).count("receive") == 1
    for node in cut.nodes:
        assert all(cut.nodes[i].device == node.device for i in node.inputs)


def test_a_missing_device_is_an_error_that_lists_what_exists() -> None:
    def fn(x: Tensor) -> Tensor:
        with device("GPU:3"):
            return ops.exp(x)

    graph = trace_of(fn, (2,))
    said = "GPU:3, which does not exist here: .*; there are .*CPU:0"
    with pytest.raises(DeviceError, match=rf"test_passes\.py:\d+: exp .*{said}"):
        place(graph, CPUS[0], CPUS)


def test_soft_placement_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: Tensor) -> Tensor:
        with device("GPU:3"):
            return ops.exp(x)

    options.set_soft_device_placement(True)
    try:
        placed, log = place(trace_of(fn, (2,)), CPUS[0], CPUS)
    finally:
        options.set_soft_device_placement(False)
    assert placed.nodes[-1].device == CPUS[0]
    assert "soft placement" in log[-1].reason
    assert "does not exist here" in caplog.text


def test_two_variables_are_swapped() -> None:
    a, b = (Variable(np.float32(value), name=name) for name, value in (("a", 1), ("b", 2)))

    @function
    def swap() -> None:
        before_a, before_b = a * 1.0, b.__tensor__()
        a.assign(before_b)
        b.assign(before_a)

    swap()
    assert (float(a.numpy()), float(b.numpy())) == (2, 1)
