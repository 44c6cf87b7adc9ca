"""Placement: give every node a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allreduce import events
from allreduce.devices import options
from allreduce.devices.names import DeviceName
from allreduce.errors import DeviceError
from allreduce.graph.node import Graph, Node, Rewriter
from allreduce.graph.ops.base import lookup


@dataclass(frozen=True, slots=True)
class Placed:
    """One row of the placement log."""

    op: str
    device: DeviceName
    reason: str
    source: str

    def __str__(self) -> str:
        return f"{self.op}: {self.device} ({self.reason}) {self.source}"


def place(
    graph: Graph, home: DeviceName, available: Sequence[DeviceName]
) -> tuple[Graph, list[Placed]]:
    """Give every node a device: what the user asked for, else where its inputs are, else `home`.

    Args:
        graph: Any graph; a node's device is what the surrounding scopes asked for.
        home: The replica's own device, in full.
        available: The devices of this task, in full.

    Raises:
        DeviceError: A node asks for a device that does not exist, and soft placement is off.
    """
    rewriter = Rewriter(graph)
    log: list[Placed] = []
    warned: set[str] = set()
    for node in graph.nodes:
        device, reason = _choose(node, rewriter, home, available, warned)
        rewriter.keep(node, device=device)
        log.append(Placed(node.op, device, reason, node.source))
    if options.current().log_device_placement:
        for row in log:
            events.logger.info("placed %s", row)
    return rewriter.finish(), log


def _choose(
    node: Node,
    rewriter: Rewriter,
    home: DeviceName,
    available: Sequence[DeviceName],
    warned: set[str],
) -> tuple[DeviceName, str]:
    if node.device is not None:
        what = f"{node.source}: {node.op}"
        return requested(what, node.device, home, available, warned)
    if lookup(node.op).kind == "compute" and node.inputs:
        # Where all its inputs are that lie anywhere: nothing has to move.
        sources = [rewriter.nodes[rewriter.moved[i]] for i in node.inputs]
        sources = [source for source in sources if source.op not in ("constant", "runtime")]
        devices = {source.device for source in sources if source.device is not None}
        if len(devices) == 1:
            return devices.pop(), "its inputs are there"
    return home, "the replica's device"


def requested(
    what: str,
    asked: DeviceName,
    home: DeviceName,
    available: Sequence[DeviceName],
    warned: set[str],
) -> tuple[DeviceName, str]:
    """Find the device that a scope asks for; returns it with the reason.

    Args:
        what: What is placed, with the user's line.
        asked: A name, whole or in part.
        home: Where it would be otherwise.
        available: What exists.
        warned: The missing names that a warning was given for; one more is added.

    Raises:
        DeviceError: It does not exist, and soft placement is off.
    """
    # Home first, so that an incomplete name does not move anything for nothing.
    for device in (home, *available):
        if asked.matches(device):
            return device, f"ar.device({str(asked)!r})"
    exists = ", ".join(str(device) for device in available)
    if not options.current().soft_device_placement:
        raise DeviceError(
            f"{what} was placed on {asked}, which does not exist here; there are {exists}. "
            f"ar.config.set_soft_device_placement(True) would use {home} instead"
        )
    if str(asked) not in warned:
        warned.add(str(asked))
        events.logger.warning("%s does not exist here (%s): using %s", asked, exists, home)
    return home, f"{asked} does not exist; soft placement"
