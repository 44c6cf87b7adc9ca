"""Limits of a device's memory: counting, refusal, and release."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import Device, lookup
from allreduce.devices.inventory import Inventory
from allreduce.errors import OutOfMemoryError, UsageError
from allreduce.graph.core import op_table


@pytest.fixture
def limited() -> Iterator[Device]:
    """Give a device that has room for 100 kB more than it uses."""
    device = lookup("CPU:3")
    _collect()
    device.memory.limit = device.memory.used + 100_000
    yield device
    device.memory.limit = None


def _collect() -> None:
    """Free objects of other tests: programs after their functions, and so on."""
    for _ in range(4):
        gc.collect()


def test_memory_counts_as_long_as_a_view_of_it_is_there() -> None:
    here = Inventory()
    here.set_logical("CPU", 2, 1000)
    first, second = here.logical("CPU")
    view = first.allocate(800).array(np.uint8, (10,), 5)
    with pytest.raises(
        OutOfMemoryError,
        match=r"201 bytes do not fit on .*CPU:0: 800 of its limit of 1000 bytes are in use; .*"
        "memory_limit",
    ):
        first.allocate(201)
    second.allocate(201)  # has its own limit
    assert (first.memory.used, first.memory.peak) == (800, 800)
    del view
    gc.collect()
    assert first.allocate(1000).nbytes == first.memory.peak == 1000


def test_memory_is_found_in_garbage_that_another_thread_collects(limited: Device) -> None:
    class Slow:
        def __init__(self) -> None:
            self.held = limited.allocate(80_000), self

        def __del__(self) -> None:
            begun.set()
            time.sleep(0.05)

    begun = threading.Event()
    gc.disable()
    try:
        Slow()
        other = threading.Thread(target=limited.allocate, args=(50_000,))
        other.start()
        assert begun.wait(25)
        assert limited.allocate(40_000).nbytes == 40_000
        other.join()
    finally:
        gc.enable()


def test_a_limit_is_part_of_what_the_first_use_fixes() -> None:
    here = Inventory()
    here.set_logical("CPU", 1, 1000)
    here.lookup("CPU:0")
    here.set_logical("CPU", 1, 1000)
    with pytest.raises(UsageError, match="must come before"):
        here.set_logical("CPU", 1, 2000)
    with pytest.raises(UsageError, match="memory_limit, a number of bytes, is an integer from 1"):
        Inventory().set_logical("CPU", 1, 0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_does_not_fit_says_on_which_device(limited: Device, replicas: int) -> None:
    strategy = ar.MirroredStrategy(["CPU:2", "CPU:3"][-replicas:])
    with strategy.scope():
        w = ar.Variable(np.zeros((10, 500), np.float32), name="w")  # 20 kB
        optimizer = ar.optim.SGD(0.1)

    def step(x: ar.Tensor) -> None:
        optimizer.minimize(ar.ops.sum(ar.ops.square(x @ w), axis=1), [w])

    small, large = strategy.distribute_dataset(
        [np.ones((rows * replicas, 10), np.float32) for rows in (2, 2000)]
    )
    before = ar.config.get_memory_info("CPU:3")["current"]
    strategy.run(step, args=(small,))
    used = ar.config.get_memory_info("CPU:3")["current"] - before
    assert 40_000 < used < 60_000, "parameters, gradients, and little else"
    with pytest.raises(OutOfMemoryError, match=r"\d{7} bytes do not fit on .*CPU:3") as caught:
        strategy.run(step, args=(large,))
    first, *_ = str(caught.value).partition("; the largest are\n")[2].splitlines()
    assert re.fullmatch(
        r"  4000000 bytes: float32\(2000, 500\) of \w+.* at .*budget.py:\d+, which was asked for",
        first,
    )
    assert "2 × 20000 bytes: float32(10, 500) of 'w', its value, gradient" in str(caught.value)
    strategy.run(step, args=(small,))
    strategy.close()


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_kernel_without_memory_says_what_has_it(
    eagerly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Any) -> None:
        np.empty(1 << 50)

    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))
    vast = ar.register_op("vast", shape=lambda specs, attrs: specs[0], cpu=kernel)
    strategy = ar.MirroredStrategy(["CPU:2"])
    with pytest.raises(OutOfMemoryError, match="Unable to allocate") as caught:
        strategy.run(lambda x: vast(ar.ops.exp(x)), args=(np.ones((500, 999)),), eagerly=eagerly)
    said, _, listed = str(caught.value).partition("; the largest are\n")
    assert re.search(r"(operator 'vast'|no memory for vast) at .*test_budget.py:\d+", said)
    assert re.search(r"3996000 bytes: float64\(500, 999\) of exp at .*test_budget.py:\d+", listed)
    strategy.close()


def test_the_memory_of_a_model_that_was_dropped_is_there_for_the_next_one() -> None:
    device, strategy = lookup("CPU:3"), ar.MirroredStrategy(["CPU:3"])
    x, y = np.ones((8, 100), np.float32), np.ones((8, 2), np.float32)

    def train() -> None:
        with strategy.scope():
            model = ar.nn.Sequential([ar.nn.Dense(100), ar.nn.Dense(2)])
            model.compile("adam", "mse")
        model.fit(x, y, verbose=0)

    _collect()
    before = device.memory.used
    train()
    try:
        device.memory.limit = before + int(1.5 * (device.memory.used - before))
        train()
        train()
    finally:
        device.memory.limit = None
        strategy.close()


@pytest.mark.parametrize("eagerly", [False, True])
def test_variables_count_from_their_first_step_on(limited: Device, eagerly: bool) -> None:
    strategy = ar.MirroredStrategy(["CPU:3"])
    with strategy.scope():
        small = ar.Variable(np.ones((10, 500), np.float32), name="small")  # 20 kB
        large = ar.Variable(np.ones((100, 500), np.float32), name="large")  # 200 kB
        total = ar.Variable(np.zeros(1000), name="total")  # 8 kB

    def count(x: ar.Tensor) -> ar.Tensor:
        total.assign(total + 1)
        return ar.ops.sum(x * small)

    before = limited.memory.used
    strategy.run(count, args=(np.float32(2),), eagerly=eagerly)
    used = limited.memory.used - before
    assert 28_000 <= used < 60_000, "the two variables, and few values"
    np.testing.assert_array_equal(total, np.ones(1000))
    with pytest.raises(OutOfMemoryError, match=r"200000 bytes do not fit on .*CPU:3"):
        strategy.run(lambda x: ar.ops.sum(x * large), args=(np.float32(2),), eagerly=eagerly)
    strategy.close()
