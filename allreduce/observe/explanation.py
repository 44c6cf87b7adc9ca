"""Explain a step: instructions, placement, and how much communication its latest run hid."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any

from rich.console import Console
from rich.table import Table

from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.events import counted
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.spec import show
from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.execute.frame import Frame
from allreduce.graph.execute.reports import nbytes_of
from allreduce.graph.inspect.sections import amount, units
from allreduce.graph.inspect.step_graph import StepGraph, name_of
from allreduce.graph.replicate.compiled import Compiled
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.streams import StreamName
from allreduce.training.ranks import rank_of

# The transport whose calls go on only while a thread of the process waits for one: to have started
# long before hides nothing there.
_IN_WAITS = "shared"


def explain(
    strategy: Replicator, step: Callable[..., Any], picture: str | PathLike[str] | None = None
) -> None:
    """Print the work of this process's first replica in a step, on rank 0 only.

    It shows the instructions per device and stream; the device of each variable and operation, with
    the reason; the bytes of each transfer, and of transfers that return what had been sent; each
    bucket, when it was ready, and the share of bytes hidden behind computation in the latest run;
    the hidden share of the batch's preparation; the duration of steps with pipelining, and without
    it if some ran so; and the memory of the values, with the lower bound of any plan. It does not
    communicate.

    Args:
        strategy: Whose replicas run it.
        step: The function; of a compiled model `model.train_step`. It has run before.
        picture: An SVG file to draw the step's graph to, too.

    Raises:
        UsageError: The strategy has not run it.
    """
    if not isinstance(strategy, Replicator):
        raise UsageError(f"explain takes a strategy and a step, not {strategy!r:.60}")
    compiled = strategy.latest(step) if callable(step) else None
    bound = compiled.executors[0].latest if compiled is not None else None
    if compiled is None or bound is None or bound.timing is None:
        name = getattr(step, "__qualname__", repr(step))
        raise UsageError(
            f"{strategy!r} has not run {name:.60} as a trace; run it once, and explain it then (of "
            "a compiled model: model.train_step)"
        )
    if rank_of(strategy) != 0:
        return
    if picture is not None:
        StepGraph(compiled.graph).draw(picture)
    console = Console(highlight=False, markup=False)
    for part in _parts(compiled, bound):
        console.print(part, soft_wrap=isinstance(part, str))


def _parts(compiled: Compiled, bound: BoundProgram) -> Iterator[str | Table]:
    frame, program, replica = bound.frame, bound.program, bound.frame.replica
    yield f"replica {replica.id}, {frame.info.rows} samples: step {frame.info.step}"
    yield from _accumulation(compiled)
    yield from _instructions(program)
    yield _variables(program)
    yield _placements(compiled, program)
    yield from _transfers(program)
    yield from _communication(bound)
    if compiled.fed is not None and compiled.fed.made:
        made, waited = compiled.fed.made, compiled.fed.waited
        yield (
            f"input: the batch took {_ms(made)} to be made, and the step waited {_ms(waited)} for "
            f"it; {max(0.0, 1 - waited / made):.0%} of it was hidden behind other steps"
        )
    yield from _pipelining(bound)
    if frame.memory.nbytes:
        needed = frame.memory.nbytes / frame.memory.least
        yield (
            f"memory of values: {units(frame.memory.nbytes)}, {needed:.2f} of the "
            f"{units(frame.memory.least)} that are in use at the worst moment"
        )


def _accumulation(compiled: Compiled) -> Iterator[str]:
    for rule, plan in compiled.updates:
        if plan.accumulation.totals is not None:
            without, updates = plan.accumulation.totals
            yield (
                f"{type(rule).__name__} updates once in {rule.gradient_accumulation} micro-batches:"
                f" of {counted(without + updates, 'step')}, {updates} reduced gradients and "
                "changed variables"
            )


def _instructions(program: Program) -> Iterator[Table]:
    devices = _devices(program)
    for device in devices:
        table = _table(name_of(device, devices), "", "stream", "instruction", "of", "waits for")
        for index, each in enumerate(program.instructions):
            if each.node.device == device:
                waits = ", ".join(map(str, each.waits))
                stream = _stream(each.stream, device)
                table.add_row(str(index), stream, _label(each.node), each.node.part, waits)
        yield table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _stream(stream: StreamName, device: DeviceName) -> str:
    return stream.kind if stream.device == device else str(stream)


def _label(node: Node) -> str:
    name = str(node.attrs["chain"]) if "chain" in node.attrs else node.op
    if "bucket" in node.attrs:
        bucket = node.attrs["bucket"]
        of = f" {bucket.index}" if bucket.first < bucket.last else " of the header"
        return f"{name}{of}"
    return f"{name} {node.spec}" if lookup(node.op).kind != "effect" else name


def _devices(program: Program) -> list[DeviceName]:
    found = {each.node.device for each in program.instructions if each.node.device is not None}
    return sorted(found, key=str)


def _variables(program: Program) -> Table:
    table = _table("variables", "variable", "shape", "device", "because")
    devices = _devices(program)
    seen: set[object] = set()
    for each in program.instructions:
        variable = each.node.attrs.get("variable")
        if variable is None or variable in seen or each.node.device is None:
            continue
        seen.add(variable)
        why = "the replica's device" if variable.device is None else f"ar.device({variable.device})"
        shape = f"{variable.dtype} {show(variable.shape)}"
        table.add_row(variable.name, shape, name_of(each.node.device, devices), why)
    return table


def _placements(compiled: Compiled, program: Program) -> Table:
    table = _table("operations, as they were traced", "device", "because", "operations")
    devices = _devices(program)
    found: dict[tuple[str, str], Counter[str]] = {}
    for each in compiled.placed:
        place = name_of(each.device, devices or [each.device]), each.reason
        found.setdefault(place, Counter())[each.op] += 1
    for (device, reason), ops in sorted(found.items()):
        listed = ", ".join(op if n == 1 else f"{op} ×{n}" for op, n in ops.most_common())
        table.add_row(device, reason, listed)
    return table


def _transfers(program: Program) -> Iterator[str]:
    devices = _devices(program)
    nodes = {each.node.id: each.node for each in program.instructions}
    sent_by = {  # of each transfer: whose value it is
        (node.attrs["edge"], node.attrs["destination"]): nodes.get(node.inputs[0])
        for node in nodes.values()
        if node.op == "send" and node.inputs
    }
    yield from _with_the_host(program, devices)
    for node in nodes.values():
        source = sent_by.get((node.attrs.get("edge"), node.attrs.get("destination")))
        if node.op != "receive" or node.device is None or source is None or source.device is None:
            continue
        origin = _origin(source, nodes, sent_by)
        ends = f"{name_of(source.device, devices)} -> {name_of(node.device, devices)}"
        back = "; NEEDLESS: it had come from there" if origin == node.device else ""
        part = f", {source.part}" if source.part else ""
        name = source.attrs.get("chain", source.op)
        yield f"{ends}: {node.spec}, {amount(node.spec)} of {name}{part}{back}"


def _with_the_host(program: Program, devices: list[DeviceName]) -> Iterator[str]:
    """Describe the transfers between devices and the host."""
    for node in (each.node for each in program.instructions):
        if node.op not in ("feed", "fetch") or node.device is None:
            continue
        there = name_of(node.device, devices)
        ends = f"host -> {there}" if node.op == "feed" else f"{there} -> host"
        what = (
            program.given[node.inputs[0]].attrs["name"] if node.op == "feed" else "what it returns"
        )
        yield f"{ends}: {node.spec}, {amount(node.spec)} of {what}"


def _origin(
    node: Node, nodes: dict[int, Node], sent_by: dict[tuple[Any, Any], Node | None]
) -> DeviceName | None:
    """Find where a value was made that only was received, and looked at, where it is sent from."""
    while lookup(node.op).view is not None and node.inputs[0] in nodes:
        node = nodes[node.inputs[0]]
    if node.op != "receive":
        return None
    source = sent_by.get((node.attrs["edge"], node.attrs["destination"]))
    return None if source is None else source.device


def _communication(bound: BoundProgram) -> Iterator[str]:
    frame, timing = bound.frame, bound.communicated
    if timing is None:
        return
    nodes = {each.node.id: each.node for each in frame.program.instructions}
    began, ended = timing.began, timing.ended
    alone = frame.replica.communicator is not None and (
        frame.replica.communicator.transport == _IN_WAITS
    )
    exposed = hidden = 0.0
    nbytes = 0
    for number, clock in timing.clocks.items():
        node = nodes[number]
        whole = clock.over - clock.started
        way = f" under way {_ms(whole)} at most," if not alone else ""
        name = _collective(frame, node)
        ready, end, waited = _ms(clock.started - began), _ms(ended - began), _ms(clock.exposed)
        yield f"{name}: ready at {ready} of {end},{way} waited for {waited}"
        size = nbytes_of(frame, node)
        nbytes += size
        exposed += clock.exposed
        hidden += size * (bool(clock.early) if alone else 1 - clock.exposed / whole)
    if nbytes:
        share = f"{hidden / nbytes:.0%} of its {units(nbytes)} was hidden behind computation"
        if alone:
            share += ", complete before it waited: calls in shared memory go on in waits alone"
        else:
            share = f"at most {share}"
        yield f"communication: the replica waited {_ms(exposed)} of {_ms(ended - began)}; {share}"


def _collective(frame: Frame, node: Node) -> str:
    if "bucket" not in node.attrs:
        return node.op
    bucket, layout = node.attrs["bucket"], frame.arena(node).layout
    names = [span.name for span in layout.spans[bucket.first : bucket.last]]
    where = f" of {node.device.local}" if len(_devices(frame.program)) > 1 and node.device else ""
    what = f"bucket {bucket.index}" if names else "the header"
    # Of clipped gradients, the sums come first, and then the norm.
    is_second = node.op == "update_slices" and node.attrs["rule"].clip_norm is not None
    if is_second or node.op == "all_gather_bucket":
        what = f"the new parameters of {what}"
    size = units(nbytes_of(frame, node))
    return f"{what}{where} ({size}: {', '.join(names) or 'the number of samples'})"


def _pipelining(bound: BoundProgram) -> Iterator[str]:
    """Describe the duration of steps with pipelining, and without it if some ran so."""
    for how, seconds in bound.recent.items():
        if seconds:
            middle = _ms(statistics.median(seconds))
            name = "with" if how else "without"
            yield f"steps {name} pipelining: {middle}, the median of {len(seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
