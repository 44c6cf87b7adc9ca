"""Memory on the CPU: allocation, views, foreign memory, copies, streams."""

from __future__ import annotations

import array as stdlib_array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest

from allreduce.devices import Buffer, Device, Event, lookup
from allreduce.devices.base import ALIGNMENT
from allreduce.devices.cpu import CpuDevice
from allreduce.devices.names import DeviceName
from allreduce.errors import InternalError, OutOfMemoryError, ShapeError, UsageError


@pytest.fixture
def cpu() -> Device:
    return CpuDevice(DeviceName.parse("CPU:0").complete())


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1000, 1_000_003])
def test_allocated_memory_is_aligned_and_zero(cpu: Device, nbytes: int) -> None:
    buffer = cpu.allocate(nbytes)
    assert buffer.nbytes == nbytes
    assert nbytes == 0 or buffer.address % ALIGNMENT == 0
    assert not buffer.bytes.any()
    assert buffer.device is cpu
    assert not buffer.symmetric


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 62, 1 << 70])
def test_too_much_names_device_and_bytes(cpu: Device, nbytes: int) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"device:CPU:0 for {nbytes} bytes"):
        cpu.allocate(nbytes)


def test_a_negative_size_is_an_error(cpu: Device) -> None:
    with pytest.raises(UsageError, match="integer from 0, not -1"):
        cpu.allocate(-1)


def test_views_share_the_memory_and_keep_it(cpu: Device) -> None:
    buffer = cpu.allocate(96)
    first = buffer.array("float32", (2, 4))
    second = buffer.array(np.float64, 8, offset=32)
    first[:] = 1
    second[:] = 2
    assert (buffer.array("float32", 8) == 1).all()
    assert second.base is not None
    del buffer
    gc.collect()
    assert (second == 2).all()


def test_empty_views_are_fine(cpu: Device) -> None:
    assert cpu.allocate(0).array("float32", (0, 3)).shape == (0, 3)
    assert cpu.allocate(8).array("float64", 0, offset=8).size == 0


def test_a_view_that_reaches_outside_says_by_how_much(cpu: Device) -> None:
    buffer = cpu.allocate(64)
    with pytest.raises(ShapeError, match=r"float32 of shape \(16,\) at offset 4 ends at byte 68"):
        buffer.array("float32", 16, offset=4)
    with pytest.raises(ShapeError, match="negative"):
        buffer.array("float32", 1, offset=-4)
    with pytest.raises(ShapeError, match="negative"):
        buffer.array("float32", (-1, -2))


def test_a_misaligned_view_is_an_error(cpu: Device) -> None:
    buffer = cpu.allocate(64)
    with pytest.raises(ShapeError, match="not aligned for float64"):
        buffer.array("float64", 2, offset=4)
    with pytest.raises(ShapeError, match="not aligned for float32"):
        Buffer.of(np.zeros(65, np.uint8)[1:], cpu).array("float32", 1)


def test_python_objects_have_no_place_in_a_buffer(cpu: Device) -> None:
    with pytest.raises(ShapeError, match="object"):
        cpu.allocate(64).array(object, 1)
    with pytest.raises(UsageError, match="Python objects"):
        Buffer.of(np.array([None, 1]), cpu)


class OnlyDLPack:
    """An array of another library, seen through DLPack only."""

    def __init__(self, data: np.ndarray[Any, Any], device: tuple[int, int] = (1, 0)) -> None:
        self._data = data
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class OnlyInterface:
    """The same, seen through the array interface."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self._data = data
        self.__array_interface__ = data.__array_interface__


FOREIGN: dict[str, Any] = {
    "ndarray": lambda data: data,
    "array interface": OnlyInterface,
    "DLPack": OnlyDLPack,
    "memoryview": memoryview,
    "ctypes": lambda data: (ctypes.c_float * data.size).from_buffer(data),
}


@pytest.mark.parametrize("wrap", FOREIGN.values(), ids=FOREIGN)
def test_foreign_memory_is_shared_both_ways(cpu: Device, wrap: Any) -> None:
    data = np.arange(12, dtype=np.float32)
    buffer = Buffer.of(wrap(data), cpu, symmetric=True)
    assert buffer.symmetric
    assert buffer.address == data.__array_interface__["data"][0]
    view = buffer.array("float32", (3, 4))
    view[0, 0] = 77
    data[11] = 78
    assert data[0] == 77
    assert view[2, 3] == 78


@pytest.mark.parametrize("wrap", [OnlyInterface, OnlyDLPack])
def test_the_owner_of_foreign_memory_lives_as_long_as_views(cpu: Device, wrap: Any) -> None:
    class Owner(np.ndarray[Any, Any]):
        """A subclass, because a plain ndarray supports no weak references."""

    data = np.arange(6, dtype=np.float64).view(Owner)
    alive = weakref.ref(data)
    view = Buffer.of(wrap(data), cpu).array("float64", 6)
    del data
    gc.collect()
    assert alive() is not None
    assert view.sum() == 15
    del view
    gc.collect()
    assert alive() is None


def test_mapped_files_and_arrays_of_numbers_are_memory_too(cpu: Device) -> None:
    with mmap.mmap(-1, 4096) as region:
        buffer = Buffer.of(region, cpu)
        assert buffer.nbytes == 4096
        buffer.bytes[5] = 9
        assert region[5] == 9
        del buffer
        gc.collect()  # a mapping that is still viewed cannot be closed
    numbers = stdlib_array.array("d", [1.0, 2.0])
    assert Buffer.of(numbers, cpu).array("float64", 2).tolist() == [1.0, 2.0]


def test_read_only_memory_stays_read_only(cpu: Device) -> None:
    view = Buffer.of(b"12345678", cpu).array("uint8", 8)
    assert bytes(view) == b"12345678"
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def test_memory_that_cannot_be_shared_is_refused(cpu: Device) -> None:
    with pytest.raises(UsageError, match=r"numpy.ndarray of shape \(4,\) is not one piece"):
        Buffer.of(np.arange(8)[::2], cpu)
    with pytest.raises(UsageError, match=r"list offers no memory"):
        Buffer.of([1.0, 2.0], cpu)
    with pytest.raises(UsageError, match="scalar without its own memory"):
        Buffer.of(np.float32(1), cpu)
    with pytest.raises(UsageError, match="not in host memory"):
        Buffer.of(OnlyDLPack(np.zeros(2), device=(2, 0)), cpu)


def test_copies_between_devices(cpu: Device) -> None:
    source, target = cpu.allocate(32), lookup("CPU:0").allocate(32)
    source.array("int32", 8)[:] = range(8)
    cpu.copy(target, source, cpu.stream("host-to-device"))
    assert target.array("int32", 8).tolist() == list(range(8))
    part = target.array("int32", 8)
    cpu.copy(part[1:], part[:-1])
    assert part.tolist() == [0, 0, 1, 2, 3, 4, 5, 6]


def test_a_copy_neither_casts_nor_broadcasts(cpu: Device) -> None:
    with pytest.raises(ShapeError, match=r"float64 \(2,\) into float32 \(2,\)"):
        cpu.copy(np.zeros(2, np.float32), np.zeros(2))
    with pytest.raises(ShapeError, match=r"\(1,\) into float64 \(2,\)"):
        cpu.copy(np.zeros(2), np.zeros(1))


def test_an_event_is_complete_when_recorded(cpu: Device) -> None:
    compute, collective = cpu.stream("compute"), cpu.stream("collective")
    event = cpu.event()
    assert not event.done()
    compute.record(event)
    collective.wait(event)
    collective.synchronize()
    event.synchronize()
    assert event.done()
    assert "'compute' of CPU:0" in repr(compute)


def test_waiting_for_what_nobody_records_does_not_hang(cpu: Device) -> None:
    with pytest.raises(InternalError, match="no stream has recorded"):
        cpu.stream("compute").wait(cpu.event())


def test_an_event_of_another_kind_is_refused(cpu: Device) -> None:
    class Other(Event):
        def done(self) -> bool:
            return True

        def synchronize(self) -> None:
            raise AssertionError("a CPU stream must not wait for it")

    with pytest.raises(InternalError, match="Other"):
        cpu.stream("compute").wait(Other())


def test_a_device_needs_a_complete_name() -> None:
    with pytest.raises(UsageError, match="'/device:CPU:0' leaves fields open"):
        CpuDevice(DeviceName.parse("CPU:0"))
