"""The program: one replica's step as frozen instructions on streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allreduce.devices.names import DeviceName
from allreduce.errors import InternalError
from allreduce.graph.core.node import Node
from allreduce.graph.schedule.streams import StreamName


@dataclass(frozen=True, slots=True)
class Instruction:
    """One node on one stream.

    Attributes:
        node: The operation; values are named by node ids.
        stream: The in-order queue that it runs on, of its device or of the other end of a copy.
        waits: The indices of instructions on other streams whose events it waits for.
        signals: Whether another instruction waits for its event.
    """

    node: Node
    stream: StreamName
    waits: tuple[int, ...] = ()
    signals: bool = False

    def __str__(self) -> str:
        waits = f" wait {', '.join(map(str, self.waits))}" if self.waits else ""
        return f"{self.stream!s:<22} {self.node}{waits}{' signal' if self.signals else ''}"


@dataclass(frozen=True, slots=True)
class Block:
    """Memory for one value, or for several of one shape and dtype in turn.

    Attributes:
        values: The nodes of the values.
        first: The instruction that writes the first value.
        last: The last instruction that uses a value, or that must not write there yet because
            another stream may still use it.
    """

    values: tuple[int, ...]
    first: int
    last: int
    device: DeviceName


@dataclass(frozen=True, slots=True)
class Program:
    """One replica's step.

    Attributes:
        instructions: The instructions, in the order of issue.
        given: Values that exist before the step, by node.
        inputs: Those of them that a call provides.
        outputs: The nodes of the returned values.
        blocks: The values that share memory; None if each has its own.
    """

    instructions: tuple[Instruction, ...]
    given: Mapping[int, Node]
    inputs: tuple[int, ...]
    outputs: tuple[Node, ...]
    blocks: tuple[Block, ...] | None = None

    def __str__(self) -> str:
        lines = [f"{'':>4} {'given':<22} {node}" for node in self.given.values()]
        lines += [f"{i:>4} {instruction}" for i, instruction in enumerate(self.instructions)]
        lines.append(f"return {', '.join(f'%{node.id}' for node in self.outputs)}")
        return "\n".join(lines)

    def check(self) -> None:
        """Check that every value exists before it is read, and every event before it is awaited."""
        made = set(self.given)
        for index, instruction in enumerate(self.instructions):
            missing = [i for i in instruction.node.inputs if i not in made]
            early = [i for i in instruction.waits if i >= index or not self.instructions[i].signals]
            if missing or early:
                raise InternalError(
                    f"instruction {index} ({instruction}) reads values {missing} that nothing made "
                    f"and waits for events {early} that nothing signals"
                )
            made.add(instruction.node.id)
