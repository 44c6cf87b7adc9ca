"""Devices: their names, memory, streams and events."""

from __future__ import annotations

from allreduce.devices.base import COLLECTIVE, Buffer, Device, Event, Stream
from allreduce.devices.inventory import Inventory, PhysicalDevice, offers_gpu_memory
from allreduce.devices.names import DeviceName
from allreduce.devices.registry import absence
from allreduce.devices.threads import affinity_cores, blas_threads, limit_blas_threads

_here = Inventory()

physical_devices = _here.physical
logical_devices = _here.logical
set_logical_devices = _here.set_logical
matching = _here.matching
lookup = _here.lookup
identities = _here.identities
take_share = _here.take_share
as_array = _here.as_array
owner = _here.owner
on_host = _here.on_host
read = _here.read
write = _here.write

__all__ = [
    "COLLECTIVE",
    "Buffer",
    "Device",
    "DeviceName",
    "Event",
    "PhysicalDevice",
    "Stream",
    "absence",
    "affinity_cores",
    "as_array",
    "blas_threads",
    "identities",
    "limit_blas_threads",
    "logical_devices",
    "lookup",
    "matching",
    "offers_gpu_memory",
    "on_host",
    "owner",
    "physical_devices",
    "read",
    "set_logical_devices",
    "take_share",
    "write",
]
