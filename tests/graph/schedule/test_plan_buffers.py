"""Planned memory: what is needed at the same time never overlaps, and little more is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce import config, nn
from allreduce.devices import DeviceName, lookup
from allreduce.graph import Variable, device, function, minimize, ops, passes, scan, set_seed
from allreduce.graph.core import pass_switches
from allreduce.graph.core.spec import BATCH, Spec, concrete
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.execute.memory import Memory, blocks_at_peak, pack
from allreduce.graph.ops.collective import all_reduce
from allreduce.graph.partition.partition import partition
from allreduce.graph.placement.placement import place
from allreduce.graph.replicate.owner import default_replicator
from allreduce.graph.schedule.plan_buffers import plan_buffers
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.schedule import schedule
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.trace import Trace, recording
from allreduce.graph.update.arenas import plan_for
from allreduce.optim import SGD
from tests.graph.interpret import record
from tests.harness import collector_off
from tests.nn.common import blobs

FLOAT = np.dtype(np.float64)
CPUS = [DeviceName.parse(f"CPU:{index}").complete() for index in range(2)]


@pytest.fixture(autouse=True)
def _all_on() -> Iterator[None]:
    yield
    for name in pass_switches.OPTIONAL:
        pass_switches.switch(name, True)


def _planned(function: Callable[..., Sequence[Any]], *shapes: tuple[Any, ...]) -> Program:
    graph = record(function, *(Spec(shape, FLOAT) for shape in shapes))
    placed, _ = place(graph, CPUS[0], CPUS)
    return plan_buffers(schedule(partition(placed)))


def _sharing(program: Program) -> list[list[str]]:
    """Name the operations that share each block."""
    ops_of = {each.node.id: each.node.op for each in program.instructions}
    return [[ops_of[i] for i in block.values] for block in program.blocks or ()]


def test_a_value_takes_over_the_block_of_one_that_nothing_needs_any_more() -> None:
    program = _planned(lambda x: [ops.tanh(ops.exp(x) * 2.0 + 1.0)], (BATCH, 3))
    assert _sharing(program) == [["exp", "multiply", "add", "tanh"]]


def _fetched(x: Tensor) -> list[Tensor]:
    y = ops.exp(x)
    return [y, y + 1.0]


def _in_another_order(x: Tensor) -> list[Tensor]:
    y = ops.exp(x)
    return [ops.transpose(y) + y]


def _later(x: Tensor) -> list[Tensor]:
    y = ops.exp(x)
    return [(y + 1.0) * y]


@pytest.mark.parametrize(
    "function",
    [
        _fetched,
        _in_another_order,
        _later,
        lambda x: [ops.where(x > 0.0, ops.exp(x), 0.0)],  # its kernel writes twice
        lambda x: [ops.sum(ops.exp(x), axis=1, keepdims=True)],
        lambda x: [ops.softmax(ops.exp(x))],
        lambda x: [ops.exp(x) + np.ones((2, 3, 3))],
    ],
)
def test_a_value_that_is_needed_or_read_otherwise_is_not_written_over(
    function: Callable[[Tensor], list[Tensor]],
) -> None:
    shared = _sharing(_planned(function, (3, 3)))
    assert [block for block in shared if "exp" in block] == [["exp"]]


def test_memory_of_a_view_lives_as_long_as_the_view() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        y = ops.reshape(ops.exp(x), (9,))
        z = ops.tanh(ops.log(x))
        return [y + 1.0, z]

    program = _planned(traced, (3, 3))
    order = [each.node.op for each in program.instructions]
    (exp,) = (block for block in program.blocks or () if order[block.first] == "exp")
    assert exp.last == order.index("add")


def test_a_collective_keeps_its_arrays_until_it_is_awaited() -> None:
    trace = Trace(replicas=2)
    with recording(trace):
        x = trace.placeholder(Spec((3,), FLOAT), "x", varies=True)
        given_away = ops.exp(x)
        total = all_reduce(given_away)
        meanwhile = ops.tanh(x) + 1.0
        outputs = [as_tensor(total * 2.0), as_tensor(meanwhile)]
    placed, _ = place(trace.finish(outputs), CPUS[0], CPUS)  # type: ignore[arg-type]  # recorded
    program = plan_buffers(schedule(placed))
    order = [each.node.op for each in program.instructions]
    lives = {order[block.first]: block for block in program.blocks or ()}
    awaited = order.index("multiply")
    assert program.instructions[awaited].waits == (order.index("all_reduce"),)
    assert awaited > order.index("tanh")
    assert lives["exp"].last == awaited - 1  # what waits for the reduction may write there
    assert lives["all_reduce"].last >= awaited


@pytest.mark.parametrize("fetched", [False, True])
def test_nothing_lies_where_a_collective_works_that_nobody_waits_for(fetched: bool) -> None:
    trace = Trace(replicas=2)
    with recording(trace):
        x = trace.placeholder(Spec((3,), FLOAT), "x", varies=True)
        total = as_tensor(all_reduce(ops.exp(x)))
        value: Tensor = x
        for _ in range(4):  # each needs two blocks at once
            value = ops.log(value) * ops.tanh(value)
        outputs = [total, as_tensor(value)] if fetched else [as_tensor(value)]
    placed, _ = place(trace.finish(outputs), CPUS[0], CPUS)  # type: ignore[arg-type]  # recorded
    program = plan_buffers(schedule(placed))
    nodes = [each.node for each in program.instructions]
    begin = [node.op for node in nodes].index("all_reduce")
    assert not program.instructions[begin].signals
    memory = Memory(program, (), lambda node: concrete(node.spec.shape, 1), lookup)
    own = [memory.array(nodes[i]) for i in (begin - 1, begin)]
    later = [memory.array(node) for node in nodes[begin + 1 :]]
    assert len(later) == 12
    assert not any(np.shares_memory(array, other) for array in own for other in later)
    assert not np.shares_memory(own[0], own[1])


def test_devices_have_pools_of_their_own() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        y = ops.exp(x)
        with device("CPU:1"):
            z = ops.tanh(y)
        with device("CPU:0"):
            return [ops.log(x) + z]

    program = _planned(traced, (BATCH, 3))
    blocks = zip(_sharing(program), program.blocks or (), strict=True)
    assert [(names, block.device.local) for names, block in blocks] == [
        (["exp"], "CPU:0"),
        (["receive", "tanh"], "CPU:1"),
        (["log", "add"], "CPU:0"),
        (["receive"], "CPU:0"),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 10)),
        min_size=1,
        max_size=30,
    )
)
def test_blocks_in_use_at_the_same_time_never_overlap(drawn: list[tuple[int, int, int]]) -> None:
    sizes = [size for size, _, _ in drawn]
    lives = [(first, first + length) for _, first, length in drawn]
    offsets, total = pack(sizes, lives)
    for a in range(len(sizes)):
        assert offsets[a] % 64 == 0
        assert 0 <= offsets[a] <= offsets[a] + sizes[a] <= total
        for b in range(a):
            at_once = lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]
            apart = offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
            assert apart or not at_once or not sizes[a] or not sizes[b]
    assert total >= sum(sizes[i] for i in blocks_at_peak(sizes, lives))


def test_a_deep_network_takes_hardly_more_than_it_needs_at_its_worst_moment() -> None:
    w = [Variable(np.ones((64, 64)), name=f"w{i}") for i in range(12)]

    def step(x: Tensor) -> list[Tensor]:
        h = x
        for i, each in enumerate(w):
            h = ops.layer_norm(ops.gelu(h @ each) + h) if i % 3 else ops.tanh(h @ each)
        loss = ops.mean(ops.square(h), axis=1)
        minimize(SGD(), loss, w)
        return [loss]

    graph = record(step, Spec((BATCH, 64), FLOAT))
    placed, _ = place(passes.optimize(graph), CPUS[0], CPUS)
    program = plan_buffers(schedule(placed))
    memory = Memory(program, (), lambda node: concrete(node.spec.shape, 32), lookup)
    apart = Memory(
        replace(program, blocks=None), (), lambda node: concrete(node.spec.shape, 32), lookup
    )
    assert memory.nbytes <= 1.1 * memory.least
    values = [i for block in program.blocks or () for i in block.values]
    assert memory.nbytes < len(values) * 32 * 64 * FLOAT.itemsize / 2
    made = [each.node for each in program.instructions if each.node.id == values[0]]
    assert memory.array(made[0]).shape == apart.array(made[0]).shape == (32, 64)


def test_values_of_a_scans_step_share_memory_too() -> None:
    start, weights = np.full((64, 64), 0.5), np.eye(64)

    def step(h: Tensor, _: Any) -> tuple[Tensor, None]:
        for _ in range(8):
            h = ops.tanh(h) @ weights
        return h, None

    def takes(planned: bool) -> tuple[int, np.ndarray]:
        pass_switches.switch("plan_buffers", planned)
        run = function(lambda h: scan(step, h, length=3)[0])
        with collector_off():
            before = config.get_memory_info("CPU:0")["current"]
            result = np.asarray(run(start))
            return config.get_memory_info("CPU:0")["current"] - before, result

    (shared, found), (apart, wanted) = takes(True), takes(False)
    assert shared < 4 * start.nbytes < apart
    np.testing.assert_array_equal(found, wanted)


def _dense() -> list[nn.Layer]:
    return [nn.Dense(8, "gelu"), nn.LayerNorm(), nn.Dropout(0.3)]


def _images() -> list[nn.Layer]:
    layers = [nn.Conv2D(3, 3, padding="same"), nn.BatchNorm(), nn.Activation("relu")]
    return [*layers, nn.MaxPool2D(2), nn.Flatten()]


@pytest.mark.parametrize(("layers", "shape"), [(_dense, (16,)), (_images, (4, 4, 1))])
def test_training_is_the_same_to_the_bit_without_it(
    layers: Callable[[], list[nn.Layer]], shape: tuple[int, ...]
) -> None:
    x, y = blobs(50, 16)

    def trained() -> list[np.ndarray]:
        set_seed(4)
        model = nn.Sequential([nn.Input(shape), *layers(), nn.Dense(3, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x.reshape(-1, *shape), y, batch_size=20, epochs=2, verbose=0)
        return model.get_weights()

    wanted = trained()
    config.passes["plan_buffers"] = False
    for one, other in zip(trained(), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_buckets_each_variable_has_a_collective_of_its_own() -> None:
    def buckets() -> int:
        w = [Variable(np.ones((2, 2)), name=name) for name in "abc"]
        rule = SGD(0.1)

        @function
        def step(x: Tensor) -> None:
            minimize(rule, ops.sum(ops.square(x @ w[0] @ w[1] @ w[2])), w)

        step(np.ones((4, 2)))
        return len(plan_for(default_replicator(), rule, w, CPUS[0]).buckets)

    assert buckets() == 1
    config.passes["bucket"] = False
    assert buckets() == 3
