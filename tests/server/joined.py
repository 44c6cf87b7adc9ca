"""Join the programs of several tasks into one, for the checker of hazards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from allreduce.graph.core.node import Node
from allreduce.graph.schedule.program import Block, Instruction, Program

Key = tuple[Any, Any, Any]


def joined(parts: Sequence[Program]) -> Program:
    """Issue the instructions of all parts in an order in which tasks could run them.

    Each task issues its own in order, and a receive waits for its send on the other task.

    Raises:
        AssertionError: The tasks wait for each other, or a receive has no send.
    """
    join = _Join(parts)
    while join.advance():
        pass
    stuck = [str(part.instructions[at]) for part, at in join.left()]
    assert not stuck, f"tasks wait for each other: {stuck}"
    blocks = [block for n, part in enumerate(parts) for block in join.blocks(n, part)]
    return Program(
        tuple(join.instructions),
        {node.id: node for n, part in enumerate(parts) for node in join.given(n, part)},
        (),
        tuple(join.node(n, node) for n, part in enumerate(parts) for node in part.outputs),
        tuple(blocks),
    )


class _Join:
    def __init__(self, parts: Sequence[Program]) -> None:
        self._parts = parts
        self.instructions: list[Instruction] = []
        self._at = [0] * len(parts)
        self._moved: dict[tuple[int, int], int] = {}  # of a part's instruction: where it stands now
        self._sent: dict[Key, int] = {}

    def advance(self) -> bool:
        """Issue one instruction of each part that can go on; returns whether there was one."""
        issued = False
        for n, part in enumerate(self._parts):
            if self._at[n] == len(part.instructions):
                continue
            old = part.instructions[self._at[n]]
            waits = [self._moved[n, i] for i in old.waits]
            node, remote = old.node, old.node.attrs.get("across")
            if node.op == "receive" and remote:
                if _key(node) not in self._sent:
                    continue
                waits.append(self._sent[_key(node)])
            index = len(self.instructions)
            if node.op == "send" and remote:
                assert _key(node) not in self._sent, f"{node} is sent twice"
                self._sent[_key(node)] = index
            self._moved[n, self._at[n]] = index
            new = self.node(n, node)
            if remote:  # the value was copied when it was sent: the receiver reads its own memory
                new = replace(new, attrs={**new.attrs, "edge": (node.op, node.attrs["edge"])})
            self.instructions.append(replace(old, node=new, waits=tuple(sorted(waits))))
            self._at[n] += 1
            issued = True
        return issued

    def left(self) -> list[tuple[Program, int]]:
        return [
            (part, at)
            for part, at in zip(self._parts, self._at, strict=True)
            if at < len(part.instructions)
        ]

    def node(self, part: int, node: Node) -> Node:
        """Give a part's node an identifier of its own."""
        return replace(
            node,
            id=self._id(part, node.id),
            inputs=tuple(self._id(part, i) for i in node.inputs),
            control=tuple(self._id(part, i) for i in node.control),
        )

    def given(self, part: int, program: Program) -> list[Node]:
        return [self.node(part, node) for node in program.given.values()]

    def blocks(self, part: int, program: Program) -> list[Block]:
        return [
            replace(
                each,
                values=tuple(self._id(part, i) for i in each.values),
                first=self._moved[part, each.first],
                last=self._moved.get((part, each.last), len(self.instructions)),
            )
            for each in program.blocks or ()
        ]

    def _id(self, part: int, node: int) -> int:
        return node * len(self._parts) + part


def _key(node: Node) -> Key:
    return node.attrs["edge"], node.attrs["source"], node.attrs["destination"]
