"""Run what reduces gradients and changes parameters only in the last of an update's steps."""

from __future__ import annotations

from allreduce.graph.core.node import Node
from allreduce.graph.execute.frame import Frame, Step

_EVERY_TIME = ("store_gradient", "store_count", "clear_gradients")


def last_only(frame: Frame, node: Node, step: Step) -> Step:
    """Return an instruction so that it runs only in the last of an update's micro-batches."""
    if "adds" not in node.attrs or node.op in _EVERY_TIME:
        return step
    arena = frame.arena(node)
    counts = node.op == "all_reduce_bucket" and node.attrs["bucket"].has_header
    checksum = frame.checksum(node) if counts else None

    def run() -> None:
        if arena.completes:
            step()
        elif checksum is not None:
            checksum.note(arena)

    return run
