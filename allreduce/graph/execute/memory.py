"""The memory of a program's values, for one batch size.

Blocks that are in use at the same time do not overlap.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from math import prod

import numpy as np

from allreduce.devices import Device, DeviceName
from allreduce.devices.base import ALIGNMENT, Buffer
from allreduce.graph.core.node import Node
from allreduce.graph.core.spec import show
from allreduce.graph.schedule.program import Block, Program

Life = tuple[int, int]


class Memory:
    """Memory pools, one per device, for the values of a program's blocks.

    Args:
        program: The program; without planned blocks, each value has its own memory.
        elsewhere: Nodes whose values have memory elsewhere.

    Attributes:
        nbytes: Bytes of all pools.
        apart: Bytes of the values outside of pools.
        least: The most bytes in use at once, over all pools: a lower bound for `nbytes`.
    """

    def __init__(
        self,
        program: Program,
        elsewhere: Collection[int],
        shape: Callable[[Node], tuple[int, ...]],
        device: Callable[[DeviceName], Device],
    ) -> None:
        self._shape = shape
        self._device = device
        self._places: dict[int, tuple[Buffer, int]] = {}
        self.nbytes = self.apart = self.least = 0
        nodes = {each.node.id: each.node for each in program.instructions}
        pools: dict[DeviceName, list[tuple[Block, Node]]] = {}
        for block in program.blocks or ():
            first = next((i for i in block.values if i not in elsewhere), None)
            if first is not None:  # its values are all of one size
                pools.setdefault(block.device, []).append((block, nodes[first]))
        for name, blocks in pools.items():
            self._lay_out(name, blocks)

    def _lay_out(self, name: DeviceName, blocks: Sequence[tuple[Block, Node]]) -> None:
        nodes = [node for _, node in blocks]
        shapes = [self._shape(node) for node in nodes]
        sizes = [_bytes(*each) for each in zip(nodes, shapes, strict=True)]
        lives = [(block.first, block.last) for block, _ in blocks]
        offsets, total = pack(sizes, lives)
        worst = blocks_at_peak(sizes, lives)
        # In words: the device knows them as long as the memory is there, and nodes know much.
        contents = [(sizes[i], describe_value(nodes[i], shapes[i])) for i in worst]
        pool = self._device(name).allocate(total, contents)
        for (block, _), offset in zip(blocks, offsets, strict=True):
            self._places.update(dict.fromkeys(block.values, (pool, offset)))
        self.nbytes += total
        self.least += sum(sizes[i] for i in worst)

    def array(self, node: Node) -> np.ndarray:
        """Return an uninitialized array for a node's value."""
        shape = self._shape(node)
        if node.id in self._places:
            pool, offset = self._places[node.id]
        else:
            assert node.device is not None, node
            size, offset = _bytes(node, shape), 0
            pool = self._device(node.device).allocate(size, [(size, describe_value(node, shape))])
            self.apart += size
        array: np.ndarray = pool.array(node.spec.dtype, shape, offset)
        return array


def pack(sizes: Sequence[int], lives: Sequence[Life]) -> tuple[list[int], int]:
    """Choose an offset for each block: largest first, each in the narrowest gap that fits.

    Args:
        sizes: In bytes.
        lives: The indices of the first and the last instruction that use each block.

    Returns:
        The offsets, aligned to cache lines, and the size of the pool.

    Source: Pisarchyk and Lee, Efficient memory management for deep neural net inference (MLSys
    2020 workshop on on-device intelligence), section 5.2, "greedy by size".
    """
    offsets = [0] * len(sizes)
    placed: list[tuple[int, int, int, int]] = []  # start, stop, first, last; sorted
    total = 0
    for block in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size = -(-sizes[block] // ALIGNMENT) * ALIGNMENT
        first, last = lives[block]
        beside = [each for each in placed if each[2] <= last and each[3] >= first]
        start = offsets[block] = _narrowest(beside, size)
        bisect.insort(placed, (start, start + size, first, last))
        total = max(total, start + size)
    return offsets, total


def _narrowest(beside: Sequence[tuple[int, int, int, int]], size: int) -> int:
    """Find the narrowest gap between sorted ranges; behind all of them, if none is wide enough."""
    end, best, narrowest = 0, -1, 0
    for start, stop, *_ in beside:
        gap = start - end
        if gap >= size and (best < 0 or gap < narrowest):
            best, narrowest = end, gap
        end = max(end, stop)
    return end if best < 0 else best


def blocks_at_peak(sizes: Sequence[int], lives: Sequence[Life]) -> list[int]:
    """List the blocks in use when most bytes are in use."""
    if not sizes:
        return []
    change = np.zeros(max(last for _, last in lives) + 2, np.int64)
    for size, (first, last) in zip(sizes, lives, strict=True):
        change[first] += size
        change[last + 1] -= size
    worst = int(np.cumsum(change).argmax())
    return [i for i, (first, last) in enumerate(lives) if first <= worst <= last]


def _bytes(node: Node, shape: tuple[int, ...]) -> int:
    return prod(shape) * node.spec.dtype.itemsize


def describe_value(node: Node, shape: tuple[int, ...]) -> str:
    """Describe a node's value and the user's line, for error messages."""
    name = node.attrs.get("chain", node.op)
    return f"{node.spec.dtype}{show(shape)} of {name} at {node.source}"
