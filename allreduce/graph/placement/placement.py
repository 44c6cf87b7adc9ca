"""Placement: give every node a device.

Devices are named as in a replica's program; `device_map.py` maps these names to actual devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from allreduce import events
from allreduce.devices import absence, options
from allreduce.devices.names import DeviceName
from allreduce.errors import DeviceError, did_you_mean
from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.scope import users_line
from allreduce.graph.placement.device_map import DeviceMap

_ANY = DeviceName()
_MISSING = "which does not exist here"
_spoken_of: set[str] = set()  # the fall-backs of soft placement that a warning was given for


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """One row of the placement log."""

    op: str
    device: DeviceName
    reason: str
    source: str

    def __str__(self) -> str:
        return f"{self.op}: {self.device} ({self.reason}) {self.source}"


def place(
    graph: Graph, home: DeviceName, available: Sequence[DeviceName]
) -> tuple[Graph, list[PlacementRow]]:
    """Give every node a device, and record the reason.

    The order of preference: the device that scopes asked for; the device of the node to colocate
    with; the common device of all inputs; the common device of the variables that are read; and
    `home`. Operations with input or output run on a CPU.

    Args:
        graph: The traced graph; a node's device is the one that scopes asked for.
        home: The replica's own device, in full.
        available: The devices that it may use, in full.
    """
    rewriter = Rewriter(graph)
    log: list[PlacementRow] = []

    def placed(i: int) -> Node:
        return rewriter.nodes[rewriter.moved[i]]

    for node in graph.nodes:
        device, reason = choose(node, placed, home, available)
        rewriter.keep(put(node, device))
        log.append(PlacementRow(node.op, device, reason, node.source))
    return rewriter.finish(), log


def put(node: Node, device: DeviceName) -> Node:
    """Place a node and the body that it repeats: a scan runs on one device."""
    attrs, body = node.attrs, node.attrs.get("body")
    if body is not None:
        inner = tuple(put(each, device) for each in body.graph.nodes)
        attrs = {**attrs, "body": replace(body, graph=replace(body.graph, nodes=inner))}
    return replace(node, device=device, beside=None, attrs=attrs)


def check_exists(what: str, asked: DeviceName, places: DeviceMap) -> None:
    """Raise an error early if replicas do not have the device that something is made for.

    Args:
        what: The new object, for errors: "layer 'dense' (Dense)".
    """
    exists = any(map(asked.matches, places.names))
    if not exists and not options.current().soft_device_placement:
        raise _refusal(
            f"{users_line()}: {what}", asked, _missing(asked), [*places.names], places.home
        )


def _missing(asked: DeviceName) -> str:
    why = absence(asked.kind)
    return f"{_MISSING}: {why}" if why else _MISSING


def _refusal(
    what: str, asked: DeviceName, why: str, available: Sequence[DeviceName], back: DeviceName
) -> DeviceError:
    others = why.startswith(_MISSING) and any(device.kind == asked.kind for device in available)
    if not why.startswith(_MISSING):
        why += f', so place it with ar.device("{back.local}")'
    jobs = {device.job for device in available if device.job is not None}
    if asked.job is not None and asked.job not in jobs:
        remedy = "; to run it on another task of a cluster, pass the function to Session.run"
        return DeviceError(
            f"{what} was placed on {asked}, but there is no job {asked.job!r}; there are "
            f"{', '.join(map(str, available))}{did_you_mean(asked.job, jobs) or remedy}"
        )
    more = " (under a strategy, of each replica: devices_per_replica)" if others else ""
    return DeviceError(
        f"{what} was placed on {asked}, {why}; there are {', '.join(map(str, available))}{more}. "
        f"ar.config.set_soft_device_placement(True) would use {back} instead"
    )


def report(log: Sequence[PlacementRow], names: Mapping[DeviceName, DeviceName]) -> None:
    """Log each operation's device with the reason, if placement is logged."""
    if options.current().log_device_placement:
        for row in log:
            device = names.get(row.device, row.device)
            events.logger.info("placed %s", PlacementRow(row.op, device, row.reason, row.source))


def choose(
    node: Node,
    placed: Callable[[int], Node],
    home: DeviceName,
    available: Sequence[DeviceName],
) -> tuple[DeviceName, str]:
    """Choose a node's device, as `place` does; returns it with the reason."""
    if node.device is not None and node.device != _ANY:
        return requested(node, node.device, home, available)
    found, reason = _preferred(node, placed, home)
    op = lookup(node.op)
    if op.host and not op.runs_on(found.kind):
        return _host(found, available), f"{node.op} runs on CPUs"
    # Never a silent copy to the host: without a kernel there it is an error.
    return (found, reason) if op.runs_on(found.kind) else requested(node, found, home, available)


def _preferred(
    node: Node, placed: Callable[[int], Node], home: DeviceName
) -> tuple[DeviceName, str]:
    """Choose a device for a node that asks for none."""
    if node.beside is not None:
        like = placed(node.beside)
        assert like.device is not None
        return like.device, f"beside its {like.op}"
    if lookup(node.op).kind in ("compute", "collective"):
        # The common device of all inputs that have one: nothing has to move.
        sources = [placed(i) for i in node.inputs]
        sources = [source for source in sources if source.op not in ("constant", "runtime")]
        devices = {source.device for source in sources if source.device is not None}
        if len(devices) == 1:
            return devices.pop(), "its inputs are there"
        # Variables stay, and values computed from samples move.
        devices = {source.device for source in sources if source.op == "read" and source.device}
        if len(devices) == 1:
            return devices.pop(), "its variable is there"
    return home, "the replica's device"


def _host(near: DeviceName, available: Sequence[DeviceName]) -> DeviceName:
    """Return a CPU, of the same task as a device if possible."""
    hosts = [device for device in available if device.kind == "CPU"]
    of_task = [device for device in hosts if (device.job, device.task) == (near.job, near.task)]
    return (of_task or hosts)[0]


def requested(
    node: Node, asked: DeviceName, home: DeviceName, available: Sequence[DeviceName]
) -> tuple[DeviceName, str]:
    """Return the device that a node asks for, with the reason."""
    op = lookup(node.op)
    # Home first, so that an incomplete name does not move anything for nothing.
    found = [device for device in (home, *available) if asked.matches(device)]
    for device in found:
        if op.runs_on(device.kind):
            return device, f"ar.device({str(asked)!r})"
    back = home if op.runs_on(home.kind) else _host(home, available)
    why = f"which has no kernel of {node.op}" if found else _missing(asked)
    exists = ", ".join(str(device) for device in available)
    if not options.current().soft_device_placement:
        raise _refusal(f"{node.source}: {node.op}", asked, why, available, back)
    key = f"{asked} {why} {back}"
    if key not in _spoken_of:
        _spoken_of.add(key)
        events.logger.warning("%s, %s (there are %s): using %s", asked, why, exists, back)
    return back, f"{asked}, {why}; soft placement"
