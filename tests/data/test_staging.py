"""Batches are brought to devices with memory of their own, while a step computes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from tests.devices import far
from tests.graph.eager.eager_cases import NETWORKS, trained


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())
    far.install(monkeypatch)


def test_each_batch_is_brought_to_its_device_once() -> None:
    trained(NETWORKS["dense"], ar.MirroredStrategy(["GPU:0", "GPU:1"]), eagerly=False)
    for name in ("GPU:0", "GPU:1"):
        # Of each of two batches, in two epochs, images and labels; and the images to predict.
        assert far.device(name).own("host-to-device").done == 4 + 4 + 2


class Refilled:
    """Makes its batches in one array."""

    def __init__(self) -> None:
        self._array = np.zeros((6, 3), np.float32)

    def __iter__(self) -> Any:
        for number in range(4):
            self._array[...] = number
            yield (self._array,)


def test_the_next_batch_is_copied_while_a_step_has_the_last() -> None:
    strategy = ar.MirroredStrategy(["GPU:0", "GPU:1"])
    step = ar.function(lambda x: ar.ops.sum(x, axis=1))
    streams = [far.device(name).own("host-to-device") for name in ("GPU:0", "GPU:1")]
    for number, (batch,) in enumerate(strategy.distribute_dataset(Refilled())):
        if number < 3:
            for stream in streams:  # with this batch still in our hands
                stream.until(number + 2)
        sums = strategy.run(step, (batch,))
        for values in strategy.local_results(sums):
            np.testing.assert_array_equal(values, np.full(3, 3.0 * number, np.float32))


def test_memory_stays_while_it_is_copied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = far.device("GPU:0")
    allocate, stream = gpu.allocate, gpu.own("host-to-device")

    def has_no_room_for_labels(nbytes: int, *, zero: bool = True) -> Any:
        if nbytes == 8:
            raise MemoryError("for labels")
        return allocate(nbytes, zero=zero)

    monkeypatch.setattr(gpu, "allocate", has_no_room_for_labels)
    dataset = [(np.ones((2, 3), np.float32), np.ones((2, 1), np.float32))]
    strategy = ar.MirroredStrategy(["GPU:0"])
    stream.gate.clear()
    with pytest.raises(MemoryError, match="for labels"):
        list(strategy.distribute_dataset(dataset))
    gc.collect()
    another = gpu.allocate(24).array(np.float32, (6,))
    stream.gate.set()
    stream.synchronize()
    assert not another.any()


def test_a_timeline_shows_it_on_the_devices_stream(tmp_path: Path) -> None:
    strategy = ar.MirroredStrategy(["GPU:0"])
    with ar.observe.timeline(tmp_path / "trace.json"):
        for (batch,) in strategy.distribute_dataset(Refilled()):
            strategy.run(ar.ops.exp, (batch,))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in trace if each["name"] == "thread_name"}
    brought = [lanes[each["tid"]] for each in trace if each["name"] == "bring a batch"]
    assert brought == ["GPU:0 host-to-device"] * 4
    of_program = {lane for lane in lanes.values() if lane.startswith("replica 0 GPU:0 ")}
    kinds = ("host-to-device", "compute", "device-to-host")
    assert of_program == {f"replica 0 GPU:0 {kind}" for kind in kinds}
