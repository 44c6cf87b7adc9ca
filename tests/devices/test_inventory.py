"""The list of devices: physical, logical, found by name, and errors for missing ones."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading

import pytest

from allreduce.devices import registry
from allreduce.devices.base import Device, Runtime
from allreduce.devices.cpu import CpuDevice, CpuRuntime
from allreduce.devices.inventory import Inventory
from allreduce.devices.names import DeviceName
from allreduce.errors import DeviceError, UsageError


@pytest.fixture
def here() -> Inventory:
    return Inventory()


def test_one_logical_cpu_unless_told_otherwise(here: Inventory) -> None:
    assert [device.name for device in here.physical("cpu")] == ["/physical_device:CPU:0"]
    (device,) = here.logical("CPU")
    assert str(device.name) == "/job:worker/replica:0/task:0/device:CPU:0"
    assert device is here.logical()[0]


def test_logical_cpus_are_made_once_and_numbered(here: Inventory) -> None:
    here.set_logical("CPU", 2)
    here.set_logical("CPU", 4)
    assert [device.index for device in here.logical("CPU")] == [0, 1, 2, 3]
    assert here.lookup("CPU:3") is here.logical()[3]
    assert len(here.physical()) == 1


def test_their_number_is_fixed_by_the_first_use(here: Inventory) -> None:
    here.set_logical("CPU", 2)
    here.lookup("CPU:1")
    here.set_logical("CPU", 2)
    with pytest.raises(UsageError, match=r"2 logical CPU devices in use.*must come before"):
        here.set_logical("CPU", 3)
    assert len(here.logical()) == 2


def test_a_single_device_is_counted_as_one(here: Inventory) -> None:
    here.lookup("CPU:0")
    with pytest.raises(UsageError, match="1 logical CPU device in use already"):
        here.set_logical("CPU", 4)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_a_number_of_devices_is_checked(here: Inventory, count: int) -> None:
    with pytest.raises(UsageError, match="an integer from 1, not"):
        here.set_logical("CPU", count)


def test_threads_that_race_to_the_first_use_get_the_same_devices(here: Inventory) -> None:
    start = threading.Barrier(4)
    seen: list[Device] = []

    def use() -> None:
        start.wait(25)
        seen.append(here.lookup("CPU:0"))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    assert len(seen) == 4
    assert len(set(map(id, seen))) == 1


@pytest.mark.parametrize(
    "name", ["", "CPU", "cpu:0", "/device:CPU:*", "/job:worker/replica:0/task:0/cpu:0", "/task:0"]
)
def test_every_form_finds_the_device(here: Inventory, name: str) -> None:
    assert here.lookup(name) is here.logical()[0]


def test_matching_lists_all_that_agree(here: Inventory) -> None:
    here.set_logical("CPU", 3)
    assert here.matching("CPU") == here.logical()
    assert [device.index for device in here.matching("/task:0/CPU:1")] == [1]
    assert here.matching("/task:1") == []
    assert here.matching("GPU") == []


def test_a_missing_index_lists_what_exists(here: Inventory) -> None:
    here.set_logical("CPU", 2)
    with pytest.raises(DeviceError) as caught:
        here.lookup("CPU:7")
    text = str(caught.value)
    assert "/job:worker/replica:0/task:0/device:CPU:7" in text
    assert "there are CPU:0, CPU:1; did you mean 'CPU:" in text
    assert 'set_logical_devices("CPU", n)' in text


def test_another_kind_suggests_the_nearest(here: Inventory) -> None:
    with pytest.raises(DeviceError, match=r"there are CPU:0; did you mean 'CPU:0'"):
        here.lookup("/device:TPU:0")


def test_another_task_is_out_of_reach(here: Inventory) -> None:
    for name in ("/job:ps/CPU:0", "/task:1/CPU:0", "/replica:1/CPU:0"):
        with pytest.raises(DeviceError, match="only devices of this process"):
            here.lookup(name)


def test_a_missing_gpu_is_explained(here: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    registry.made.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    try:
        with pytest.raises(DeviceError, match=r"no NVIDIA driver is installed.*there are CPU:0"):
            here.lookup("GPU:0")
        with pytest.raises(DeviceError, match=r"no logical GPU devices.*no NVIDIA driver"):
            here.set_logical("GPU", 2)
        assert here.physical("GPU") == []
        assert here.logical("gpu") == []
        monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
        monkeypatch.setattr(importlib.util, "find_spec", missing_package)
        registry.made.cache_clear()
        with pytest.raises(DeviceError, match=r"cuda.core, cupy are missing.*allreduce\[cuda12\]"):
            here.lookup("GPU:0")
    finally:
        monkeypatch.undo()
        registry.made.cache_clear()


def missing_package(name: str) -> None:
    raise ModuleNotFoundError(name)


def test_an_unknown_kind_is_an_error(here: Inventory) -> None:
    with pytest.raises(
        DeviceError, match=r"unknown kind of device 'NPU': there are CPU, GPU; did you mean 'GPU'"
    ):
        here.physical("NPU")
    with pytest.raises(DeviceError, match="did you mean 'CPU'"):
        here.physical("CPUs")


class PairRuntime(Runtime):
    """A kind with two physical devices, as another file would bring it."""

    kind = "PAIR"

    def count(self) -> int:
        return 2

    def open(self, name: DeviceName, physical: int) -> Device:
        device = CpuDevice(name)
        device.physical = physical  # type: ignore[attr-defined]
        return device


def test_a_new_kind_is_one_row(here: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.RUNTIMES, "PAIR", f"{__name__}:PairRuntime")
    assert sys.modules[__name__].PairRuntime is PairRuntime
    assert len(here.physical("pair")) == 2
    here.set_logical("PAIR", 3)
    assert [getattr(device, "physical", None) for device in here.logical("PAIR")] == [0, 1, 0]
    assert here.lookup("/device:PAIR:2").kind == "PAIR"
    registry.made.cache_clear()


def test_registered_runtimes_exist() -> None:
    assert isinstance(registry.runtime("CPU"), CpuRuntime)
    for kind in registry.RUNTIMES:
        assert registry.runtime(kind).kind == kind
