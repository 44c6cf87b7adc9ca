"""Batches are brought to devices with memory of their own, while a step computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.data import staging
from allreduce.devices import Buffer, Stream, options
from allreduce.devices.cpu import CpuDevice, CpuStream
from tests.graph.eager_cases import NETWORKS, trained

DEADLINE = 20.0  # seconds that a copy may take


class Late(CpuStream):
    """Copies in a thread of its own, and not at once."""

    def __init__(self, device: Far, name: str) -> None:
        super().__init__(device, name)
        self.copied = 0
        self.news = threading.Condition()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._given = 0
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, work: Callable[[], None]) -> None:
        self._given += 1
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(1e-3)
            work()
            with self.news:
                self.copied += 1
                self.news.notify_all()

    def synchronize(self) -> None:
        self.wait_for(self._given)

    def wait_for(self, copies: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: self.copied >= copies, DEADLINE)


class Far(CpuDevice):
    """Has memory of its own, full of what is no number; only its stream copies into it."""

    reads_host = False

    def __init__(self, *named: Any) -> None:
        super().__init__(*named)
        self.streams: list[Late] = []

    def allocate(self, nbytes: int, contents: Any = ()) -> Buffer:
        made = super().allocate(nbytes, contents)
        made.bytes.fill(0xFF)
        return made

    def stream(self, name: str) -> CpuStream:
        assert name == "host-to-device"
        self.streams.append(Late(self, name))
        return self.streams[-1]

    def copy(self, target: Any, source: Any, stream: Stream | None = None) -> None:
        assert isinstance(stream, Late)
        stream.give(lambda: np.copyto(target, source))


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())


def _feed_far(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Far]:
    """Return the devices that strategies feed from here on, by name."""
    made: dict[Any, Far] = {}
    monkeypatch.setattr(staging, "lookup", lambda name: made.setdefault(name, Far(name)))
    return made


@pytest.mark.parametrize("network", ["dense", "images"])
def test_training_gives_the_same_bits(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    wanted = trained(NETWORKS[network], strategy, eagerly=False)
    far = _feed_far(monkeypatch)
    for one, other in zip(trained(NETWORKS[network], strategy, eagerly=False), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(far) == 2
    for device in far.values():
        assert [stream.copied for stream in device.streams] == [4, 4, 2]  # two epochs, and predict


def test_the_next_batch_is_copied_while_a_step_has_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = _feed_far(monkeypatch)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    step = ar.function(lambda x: ar.ops.sum(x, axis=1))
    refilled = np.zeros((6, 3), np.float32)

    class Refilled:
        """Makes its batches in one array."""

        def __iter__(self) -> Any:
            for number in range(4):
                refilled[...] = number
                yield (refilled,)

    for number, (batch,) in enumerate(strategy.distribute_dataset(Refilled())):
        if number < 3:
            for device in far.values():  # with this batch still in our hands
                device.streams[0].wait_for(number + 2)
        sums = strategy.run(step, (batch,))
        for values in strategy.local_results(sums):
            np.testing.assert_array_equal(values, np.full(3, 3.0 * number, np.float32))
