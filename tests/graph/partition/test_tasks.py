"""A program of two tasks: what crosses, and both tasks running it in one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import DeviceName
from allreduce.errors import PeerLostError, TimeoutError, UsageError
from allreduce.graph import Replicator, scope_of
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.execute.executor import Executor
from allreduce.graph.partition.partition import partition, partition_tasks, task_of
from allreduce.graph.partition.rendezvous import Key, LocalRendezvous
from allreduce.graph.partition.tasks import Part, split
from allreduce.graph.placement.device_map import DeviceMap
from allreduce.graph.placement.placement import place
from allreduce.graph.replicate.compiled import compile_part
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.schedule import schedule
from allreduce.graph.trace.replica import Replica, StepInfo
from tests.graph.interpret import interpret, record

HERE, HERE_TOO, OTHER, OTHER_TOO = (
    DeviceName.parse(f"/task:{task}/CPU:{index}").complete()
    for task in range(2)
    for index in range(2)
)
FLOATS = Spec((BATCH, 3), np.dtype(np.float32))


class TwoTasks(Replicator):
    """One replica that spans two tasks, both of which are this process."""

    @property
    def places(self) -> list[DeviceMap]:
        return [DeviceMap(HERE, {HERE: HERE, HERE_TOO: HERE_TOO, OTHER: HERE, OTHER_TOO: HERE_TOO})]

    @property
    def replicas(self) -> list[Replica]:
        return [Replica(0, 0, None, self.places[0], guard=threading.Lock())]


def _run(executors: Sequence[Executor], feeds: Sequence[Any], info: StepInfo) -> list[Any]:
    """Run each task in a thread of its own; an error stands in the place of a task's results."""
    results: list[Any] = [None] * len(executors)

    def run(index: int) -> None:
        try:
            results[index] = executors[index].run(feeds[index], info, batch=False)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(executors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def _placed(fn: Any) -> Graph:
    return place(record(fn, FLOATS), HERE, [HERE, HERE_TOO, OTHER, OTHER_TOO])[0]


def _executors(graph: Graph) -> tuple[list[Part], list[Executor]]:
    """Compile each task's part of a graph; returns the parts and their executors."""
    meeting, host = LocalRendezvous(), TwoTasks()
    parts = list(split(graph).values())
    return parts, [compile_part(host, part.graph, meeting) for part in parts]


def _cut(fn: Any) -> Program:
    return schedule(partition(_placed(fn)))


def _there_and_back(x: ar.Tensor) -> list[ar.Tensor]:
    y = ar.ops.exp(x)
    with ar.device("/task:1/CPU:0"):
        z = ar.ops.log(y) + ar.ops.sqrt(y)
    with ar.device("/task:1/CPU:1"):
        w = ar.ops.tanh(y) * z
    with ar.device("/task:0/CPU:0"):
        return [w + y, z - y]


def test_a_tensor_goes_to_a_task_once_and_from_there_to_its_devices() -> None:
    nodes = [each.node for each in _cut(_there_and_back).instructions]
    sends = [(n.attrs["source"], n.attrs["destination"]) for n in nodes if n.op == "send"]
    assert Counter(sends) == {
        (str(HERE), str(OTHER)): 1,  # y
        (str(OTHER), str(OTHER_TOO)): 2,  # y again, inside of the task, and z
        (str(OTHER_TOO), str(HERE)): 1,  # w
        (str(OTHER), str(HERE)): 1,  # z
    }
    sent = [n.attrs for n in nodes if n.op == "send"]
    assert len({(a["edge"], a["source"], a["destination"]) for a in sent}) == len(sent)


def test_a_view_is_not_sent_but_repeated() -> None:
    def fn(x: ar.Tensor) -> list[ar.Tensor]:
        y = ar.ops.tanh(x)
        turned, row = ar.ops.transpose(y), y[0:1]
        with ar.device("CPU:1"):
            return [ar.ops.sum(turned, axis=1) + ar.ops.sum(y), row * 2.0]

    graph = record(fn, Spec((300, 70), np.dtype(np.float32)))
    placed, _ = place(graph, HERE, [HERE, HERE_TOO])
    program = schedule(partition(placed))
    sent = [each.node.spec.shape for each in program.instructions if each.node.op == "send"]
    assert sorted(sent) == [(1, 70), (300, 70)], "all of y once, and the row"
    # The sum goes through memory in the same order as on one device, so that it rounds alike.
    x = np.random.default_rng(0).standard_normal((300, 70)).astype(np.float32)
    places = DeviceMap(HERE, {HERE: HERE, HERE_TOO: HERE_TOO})
    replica = replace(TwoTasks().replicas[0], places=places)
    found = Executor(program, replica, {}).run([x], StepInfo(1, 0, 1), batch=False)
    for one, other in zip(found, interpret(graph, [x]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_parts_hold_their_own_tasks_nodes_and_compute_what_the_whole_does() -> None:
    graph = _placed(_there_and_back)
    parts, executors = _executors(graph)
    for number, part in enumerate(parts):
        assert {task_of(node).task for node in part.graph.nodes} == {number}
    assert [part.feeds for part in parts] == [(0,), ()]
    assert [part.fetches for part in parts] == [(0, 1), ()]
    x = np.random.default_rng(0).random((5, 3)).astype(np.float32)
    found, nothing = _run(executors, [[x], []], StepInfo(5, 0, 1))
    assert nothing == []
    for one, other in zip(found, interpret(graph, [x], 5), strict=True):
        np.testing.assert_array_equal(one, other)


def test_transfers_stand_in_one_order_on_each_task() -> None:
    def crossing(x: ar.Tensor) -> list[ar.Tensor]:
        with ar.device("/task:1/CPU:0"):
            first, second = ar.ops.exp(x), ar.ops.tanh(x)
        with ar.device("/task:0/CPU:0"):
            third = second * 2.0
            return [first + 1.0, third]

    whole = partition_tasks(_placed(crossing))
    order = [n.attrs["edge"] for n in whole.nodes if n.op == "receive"]
    for part in split(_placed(crossing)).values():
        moved = [node for node in part.graph.nodes if node.op in ("send", "receive")]
        assert [n.attrs["edge"] for n in moved] == [e for e in order if e in _edges(moved)]
        for before, after in pairwise(moved):
            assert before.id in after.control


def _edges(nodes: Sequence[Node]) -> set[int]:
    return {node.attrs["edge"] for node in nodes}


def test_an_order_between_tasks_is_kept_by_a_transfer_without_a_value() -> None:
    with scope_of(TwoTasks()), ar.device("/task:1/CPU:0"):
        v = ar.Variable(np.zeros(3, np.float32), name="v")

    def fn(x: ar.Tensor) -> list[ar.Tensor]:
        ar.print("here", ar.ops.sum(x))
        v.assign(ar.ops.sum(x, axis=0))
        return [v * 2.0]

    placed, _ = place(record(fn, FLOATS), HERE, [HERE, OTHER])
    cut = partition(placed)
    assign = next(node for node in cut.nodes if node.op == "assign")
    (waits,) = [cut.nodes[i] for i in assign.control]
    assert (waits.op, waits.device) == ("receive", assign.device)
    (sent,) = [cut.nodes[i] for i in waits.control]
    assert (sent.inputs, [cut.nodes[i].op for i in sent.control]) == ((), ["print"])


def test_an_error_of_one_task_ends_the_other_with_the_cause() -> None:
    def fn(x: ar.Tensor) -> list[ar.Tensor]:
        with ar.device("/task:1/CPU:0"):
            labels = ar.ops.cast(ar.ops.sum(x, axis=1), "int64")
            y = ar.ops.sparse_softmax_cross_entropy(labels, x)
        with ar.device("/task:0/CPU:0"):
            return [y * 2.0]

    _, executors = _executors(_placed(fn))
    bad = np.full((2, 3), 9, np.float32)
    waiting, failed = _run(executors, [[bad], []], StepInfo(2, 0, 1))
    assert isinstance(failed, UsageError)
    assert isinstance(waiting, PeerLostError)
    assert waiting.__cause__ is failed
    assert f"step 1 was ended by {type(failed).__name__}" in str(waiting)
    # The next step has nothing to do with it.
    (good,), _ = _run(executors, [[np.zeros((2, 3), np.float32)], []], StepInfo(2, 0, 2))
    np.testing.assert_allclose(good, 2 * np.log(3), rtol=1e-6)


def test_a_rendezvous_drops_what_an_ended_step_has_sent() -> None:
    meeting, key = LocalRendezvous(), Key(0, 1, 2, "a", "b")
    with pytest.raises(TimeoutError, match=r"from a to b within 0.01 s \(edge 2, step 1\)"):
        meeting.receive(key, 0.01)
    meeting.send(key, np.ones(1))
    meeting.abort(0, 1, RuntimeError("over"))
    with pytest.raises(PeerLostError, match="step 1 was ended by RuntimeError: over"):
        meeting.receive(key, 1)
    later = Key(0, 2, 2, "a", "b")
    meeting.send(later, np.ones(1))
    assert meeting.receive(later, 1) == 1
