"""Assign instructions to streams: each device has one for each kind of work.

Copies between devices use the streams that TensorFlow uses ("Improving the GPU runtime of
TensorFlow", `gpu_util.cc`): from the host on the receiver's stream, to the host and between
devices on the sender's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from allreduce.devices import COLLECTIVE
from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup

COMPUTE = "compute"
TO_DEVICE, TO_HOST, ACROSS = "host-to-device", "device-to-host", "device-to-device"
KINDS = (COMPUTE, COLLECTIVE, TO_DEVICE, TO_HOST, ACROSS)
_WITH_THE_HOST = {"feed": TO_DEVICE, "fetch": TO_HOST}


class StreamName(NamedTuple):
    """One of a device's streams, which runs in order."""

    device: DeviceName
    kind: str

    def __str__(self) -> str:
        return f"{self.device.local} {self.kind}"


def stream_of(node: Node) -> StreamName:
    """Return the stream that a placed node runs on."""
    assert node.device is not None, node
    kind = lookup(node.op).kind
    if node.op in _WITH_THE_HOST:
        return StreamName(node.device, _WITH_THE_HOST[node.op])
    if kind == "transfer":
        ends = node.attrs["source"], node.attrs["destination"]
        return _of_copy(*ends, node.op == "send", node.attrs["across"])
    return StreamName(node.device, COLLECTIVE if kind == "collective" else COMPUTE)


@lru_cache(maxsize=256)
def _of_copy(source: str, destination: str, sends: bool, across: bool) -> StreamName:
    """Return the stream of a send or of a receive, whose ends are full names.

    A transfer between tasks goes through the memory of both hosts.
    """
    start, end = DeviceName.parse(source), DeviceName.parse(destination)
    if across:
        return StreamName(start, TO_HOST) if sends else StreamName(end, TO_DEVICE)
    if start.on_host and not end.on_host:
        return StreamName(end, TO_DEVICE)
    return StreamName(start, TO_HOST if end.on_host and not start.on_host else ACROSS)
