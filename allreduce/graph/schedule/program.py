"""The program: what one replica does in a step, as frozen instructions over streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allreduce.devices.names import DeviceName
from allreduce.errors import InternalError
from allreduce.graph.core.node import Node
from allreduce.graph.schedule.streams import StreamName


@dataclass(frozen=True, slots=True)
class Instruction:
    """One node, on one stream.

    Attributes:
        node: What to do; values are named by node ids.
        stream: In-order queue of its device's, or of the other end's of a copy, that it runs on.
        waits: Instructions of other streams whose events it waits for, by their index.
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
    """Memory for one value, or for several of one shape and dtype that take it over in turn.

    Attributes:
        values: The nodes whose values they are.
        first: The instruction that writes the first of them.
        last: The last instruction that uses one, or that must not write there yet: one of another
            stream, which does not know that such a use is over.
        device: Where it lies.
    """

    values: tuple[int, ...]
    first: int
    last: int
    device: DeviceName


@dataclass(frozen=True, slots=True)
class Program:
    """What one replica does in a step.

    Attributes:
        instructions: In the order in which they are issued.
        given: Values that are there before, by node.
        inputs: Those of them that a call brings.
        outputs: What is returned.
        blocks: Which values share memory; None where each has its own.
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
        """Prove that every value exists before it is read, and every awaited event before its wait.

        Raises:
            InternalError: It does not hold; the message names the instruction.
        """
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
