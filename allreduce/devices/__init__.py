"""Where computation and memory are: names, devices, buffers, streams and events."""

from __future__ import annotations

from allreduce.devices.base import Buffer, Device, Event, Stream
from allreduce.devices.inventory import Inventory, PhysicalDevice, lacks_runtime
from allreduce.devices.names import DeviceName
from allreduce.devices.threads import affinity_cores, blas_threads, limit_blas_threads

_here = Inventory()

physical_devices = _here.physical
logical_devices = _here.logical
set_logical_devices = _here.set_logical
matching = _here.matching
lookup = _here.lookup

__all__ = [
    "Buffer",
    "Device",
    "DeviceName",
    "Event",
    "PhysicalDevice",
    "Stream",
    "affinity_cores",
    "blas_threads",
    "lacks_runtime",
    "limit_blas_threads",
    "logical_devices",
    "lookup",
    "matching",
    "physical_devices",
    "set_logical_devices",
]
