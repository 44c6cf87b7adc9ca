"""The memory of a program's values, for one batch size.

Blocks that are in use at the same time do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod

import numpy as np

from allreduce.devices import Device, DeviceName
from allreduce.devices.base import ALIGNMENT, Buffer
from allreduce.graph.canaries import GUARD, Canaries
from allreduce.graph.node import Node
from allreduce.graph.program import Block, Program
from allreduce.graph.spec import show

Life = tuple[int, int]


class Memory:
    """Pools of memory, one per device, in which the values of a program's blocks lie.

    Args:
        program: Its blocks say what may share memory; without a plan each value has its own.
        elsewhere: Nodes whose values are not to lie here.
        shape: Gives the shape of a node's value.
        device: Gives the device that a program calls by a name.
        guarded: Whether each value has bytes before and behind it that `intact` looks at.

    Attributes:
        nbytes: Of all pools.
        least: What is in use at the worst moment of each pool: for these lives of blocks they
            cannot be smaller.
    """

    def __init__(
        self,
        program: Program,
        elsewhere: Collection[int],
        shape: Callable[[Node], tuple[int, ...]],
        device: Callable[[DeviceName], Device],
        guarded: bool = False,
    ) -> None:
        self._guards: dict[int, Canaries] | None = {} if guarded else None
        self._shape = shape
        self._device = device
        self._places: dict[int, tuple[Buffer, int]] = {}
        self.nbytes = self.least = 0
        nodes = {each.node.id: each.node for each in program.instructions}
        pools: dict[DeviceName, list[tuple[Block, Node]]] = {}
        for block in program.blocks or ():
            first = next((i for i in block.values if i not in elsewhere), None)
            if first is not None:  # its values are all of one size
                pools.setdefault(block.device, []).append((block, nodes[first]))
        for name, blocks in pools.items():
            self._lay_out(name, blocks)

    def _bytes(self, node: Node) -> int:
        return prod(self._shape(node)) * node.spec.dtype.itemsize

    def _lay_out(self, name: DeviceName, blocks: Sequence[tuple[Block, Node]]) -> None:
        sizes = [self._bytes(node) for _, node in blocks]
        lives = [(block.first, block.last) for block, _ in blocks]
        offsets, total = pack(sizes, lives)
        # In words: the device knows them as long as the memory is there, and nodes know much.
        contents = [
            (sizes[i], said(blocks[i][1], self._shape(blocks[i][1])))
            for i in at_worst(sizes, lives)
        ]
        pool = self._device(name).allocate(total, contents)
        for (block, _), offset in zip(blocks, offsets, strict=True):
            self._places.update(dict.fromkeys(block.values, (pool, offset)))
        self.nbytes += total
        self.least += least(sizes, lives)

    def array(self, node: Node) -> np.ndarray:
        """Return where a node's value goes; it may hold anything."""
        if node.id in self._places:
            pool, offset = self._places[node.id]
        else:
            assert node.device is not None, node
            size, offset = self._bytes(node), 0 if self._guards is None else GUARD
            contents = [(size, said(node, self._shape(node)))]
            pool = self._device(node.device).allocate(size + 2 * offset, contents)
            if self._guards is not None:
                self._guards[node.id] = Canaries(pool.array(np.uint8, (size + 2 * GUARD,)))
        array: np.ndarray = pool.array(node.spec.dtype, self._shape(node), offset)
        return array

    def intact(self, node: Node) -> bool:
        """Say whether nothing was written before or behind a value, if that can be told."""
        guards = (self._guards or {}).get(node.id)
        return guards is None or guards.intact


def pack(sizes: Sequence[int], lives: Sequence[Life]) -> tuple[list[int], int]:
    """Choose an offset for each block: the largest first, each in the narrowest gap that holds it.

    Args:
        sizes: In bytes.
        lives: The first and the last instruction that uses each.

    Returns:
        The offsets, aligned to cache lines, and the size of the pool.

    Source: Pisarchyk and Lee, Efficient memory management for deep neural net inference (MLSys
    2020 workshop on on-device intelligence), section 5.2, "greedy by size".
    """
    offsets = [0] * len(sizes)
    placed = np.zeros((len(sizes), 4), np.int64)  # first, last, start, stop
    total = 0
    largest_first = sorted(range(len(sizes)), key=lambda each: -sizes[each])
    for count, block in enumerate(largest_first):
        size = -(-sizes[block] // ALIGNMENT) * ALIGNMENT
        first, last = lives[block]
        before = placed[:count]
        beside = before[(before[:, 0] <= last) & (before[:, 1] >= first)]
        start = _narrowest(beside[:, 2:], size)
        offsets[block] = start
        placed[count] = (first, last, start, start + size)
        total = max(total, start + size)
    return offsets, total


def _narrowest(beside: np.ndarray, size: int) -> int:
    """Find the narrowest gap between ranges; behind all of them, if none is wide enough."""
    if not len(beside):
        return 0
    order = beside[np.argsort(beside[:, 0], kind="stable")]
    ends = np.concatenate(([0], np.maximum.accumulate(order[:, 1])))
    gaps = order[:, 0] - ends[:-1]
    wide = np.flatnonzero(gaps >= size)
    return int(ends[wide[np.argmin(gaps[wide])]] if len(wide) else ends[-1])


def least(sizes: Sequence[int], lives: Sequence[Life]) -> int:
    """Return the bytes in use at the worst moment: no pool can be smaller."""
    return sum(sizes[i] for i in at_worst(sizes, lives))


def at_worst(sizes: Sequence[int], lives: Sequence[Life]) -> list[int]:
    """List which blocks are in use when most bytes are."""
    if not sizes:
        return []
    change = np.zeros(max(last for _, last in lives) + 2, np.int64)
    for size, (first, last) in zip(sizes, lives, strict=True):
        change[first] += size
        change[last + 1] -= size
    worst = int(np.cumsum(change).argmax())
    return [i for i, (first, last) in enumerate(lives) if first <= worst <= last]


def said(node: Node, shape: tuple[int, ...]) -> str:
    """Say what a node's value is, and which line of the program asked for it."""
    name = node.attrs.get("chain", node.op)
    return f"{node.spec.dtype}{show(shape)} of {name} at {node.source}"
