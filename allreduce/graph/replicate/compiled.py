"""Compile a function for replicas: trace, passes, placement, partition, schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allreduce import events
from allreduce.devices.options import start_logging
from allreduce.errors import UsageError
from allreduce.graph import passes
from allreduce.graph.consistency.rank_check import Facts
from allreduce.graph.core import pass_switches
from allreduce.graph.core.node import Graph
from allreduce.graph.core.op_table import lookup
from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.execute.executor import Executor
from allreduce.graph.execute.timing import BatchTiming
from allreduce.graph.partition.partition import partition
from allreduce.graph.partition.rendezvous import Rendezvous
from allreduce.graph.placement.placement import PlacementRow, place, report
from allreduce.graph.schedule.dependence import dependents, of_replica
from allreduce.graph.schedule.plan_buffers import plan_buffers
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.schedule import schedule
from allreduce.graph.trace.output_structure import OutputStructure, take_apart
from allreduce.graph.trace.replica import Replica
from allreduce.graph.trace.signature import Arguments
from allreduce.graph.trace.subgraph import joins_rows
from allreduce.graph.trace.trace import Trace, recording
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.arena_plan import ArenaPlan
from allreduce.graph.update.arenas import plan_for
from allreduce.graph.update.program_check import (
    StepDigest,
    call,
    check_equal,
    check_once,
    check_owner,
    compare,
    compared_variables,
    name_of,
    needs_all,
    summary,
    synchronize,
)
from allreduce.graph.update.update import LocalReplicas, UpdateRule
from allreduce.reduction import ArenaShare


@dataclass(slots=True)
class Compiled:
    """A compiled step.

    Attributes:
        graph: Each replica's graph: placed, optimized, bucketed and partitioned.
        updates: The optimizers that the step applies, each with its arena.
        agreement: The digest that ranks compare before each run, if the step exchanges or assigns
            values without an optimizer.
        placed: The device of each operation, with the reason.
        fed: The timing of the latest step's batch, if known.
        compared_variables: The variables that must be equal on all ranks.
        accumulates: Whether it adds its gradients to those of earlier steps.
        finishes: Whether it only applies the gradients of earlier steps.
    """

    graph: Graph
    executors: list[Executor]
    returned: OutputStructure
    updates: list[tuple[UpdateRule, ArenaPlan]]
    agreement: StepDigest | None = None
    placed: Sequence[PlacementRow] = ()
    fed: BatchTiming | None = None
    compared_variables: Sequence[Variable] = ()
    accumulates: bool = False
    finishes: bool = False

    @property
    def bound_programs(self) -> list[BoundProgram]:
        """The bound programs of all executors."""
        return [bound for executor in self.executors for bound in executor.bound_programs]

    def begin(self) -> None:
        """Decide before a step whether it completes an update."""
        for rule, plan in self.updates:
            size = rule.gradient_accumulation
            if size > 1 and not self.accumulates:
                raise UsageError(
                    f"{type(rule).__name__}.gradient_accumulation was set to {size} after a step "
                    "with it had been traced; set it before the first step, or call compile again"
                )
            plan.accumulation.begin(0 if self.finishes else size)

    def release(self) -> None:
        """Free all memory; no more steps can run."""
        for executor in self.executors:
            executor.release()


def compile_step(host: LocalReplicas, fn: Callable[..., Any], arguments: Arguments) -> Compiled:
    """Trace `fn` and compile it for every local replica; all ranks call this."""
    with events.span("compile", function=name_of(fn)):
        graph, returned = _trace(host, fn, arguments)
        if host.num_replicas_in_sync > 1:
            _check_equal_changes(graph)
        graph, placed = _placed(host, graph)
        # Replicas of one process run the same program; ranks make sure of it.
        several_ranks = len(host.devices) < host.num_replicas_in_sync
        shares = any(
            lookup(node.op).kind == "collective" or node.op == "assign" for node in graph.nodes
        )
        # If an optimizer updates, the checksum in its first bucket detects a difference.
        compared = shares and not any(node.op == "apply_gradients" for node in graph.nodes)
        if pass_switches.is_on("prune"):  # a result of only one rank may be a collective's value
            graph = passes.prune(graph)
        facts = summary(graph) if several_ranks else None
        variables = compared_variables(graph) if several_ranks else ()
        host.rank_digest.involve(variables)
        agreement = None
        if facts is not None and compared:
            agreement = StepDigest(facts, joins_rows(graph.nodes))
        if agreement is not None:  # as ranks do that traced it before
            compare(host, agreement, arguments.rows_per_replica is not None)
        synchronize(host, _variables(graph))
        updates = _updates(host, graph)
        _settle(graph)  # the ones that no optimizer holds yet
        accumulates = any(rule.gradient_accumulation > 1 for rule, _ in updates)
        finishes = any(node.op == "apply_gradients" and not node.inputs for node in graph.nodes)
        graph, executors = _in_buckets(host, _optimized(graph), updates, facts)
        return Compiled(
            *(graph, executors, returned, updates, agreement, placed),
            compared_variables=variables,
            accumulates=accumulates,
            finishes=finishes,
        )


def _in_buckets(
    host: LocalReplicas,
    graph: Graph,
    updates: list[tuple[UpdateRule, ArenaPlan]],
    facts: Facts | None,
) -> tuple[Graph, list[Executor]]:
    """Cut an optimized graph's updates into buckets, and prepare every local replica for it."""
    plans = [plan for _, plan in updates]
    graph = passes.bucket(graph, plans, host.num_replicas_in_sync)
    if facts is not None:
        graph = passes.order_collectives(graph)
    graph = partition(graph)
    program = _program(graph)
    executors = [
        Executor(program, each, {id(plan): plan.arenas[each.index] for plan in plans}, facts)
        for each in host.replicas
    ]
    return graph, executors


def compile_alone(
    host: LocalReplicas, fn: Callable[..., Any], arguments: Arguments, replica: Replica
) -> Compiled:
    """Trace `fn` and compile it for one of several replicas, without the others."""
    with events.span("compile", function=name_of(fn)):
        graph, returned = _trace(host, fn, arguments)
        if any(lookup(node.op).kind == "collective" for node in graph.nodes):
            raise needs_all(fn, "has collectives", host.num_replicas_in_sync)
        if any(graph.nodes[i].attrs["changes"] for i in graph.effects):
            raise needs_all(fn, "changes variables", host.num_replicas_in_sync)
        graph, placed = _placed(host, graph)
        _settle(graph)
        graph = partition(_optimized(graph))
        executor = Executor(_program(graph), replica, {})
        return Compiled(graph, [executor], returned, [], placed=placed)


def compile_part(host: LocalReplicas, graph: Graph, rendezvous: Rendezvous) -> Executor:
    """Compile one task's part of a placed graph; other programs may change the same variables.

    Args:
        host: One replica, with a guard, on the devices of the part.
        graph: The part, with its transfers from and to other tasks.
        rendezvous: Exchanges values with the other parts.
    """
    replica = host.replicas[0]
    assert replica.guard is not None
    with replica.guard:  # both move variables
        plans = [plan for _, plan in _updates(host, graph)]
        _settle(graph)
    program = _program(partition(passes.bucket(_optimized(graph), plans, 1)))
    arenas = {id(plan): ArenaShare(plan.arenas[0]) for plan in plans}
    return Executor(program, replica, arenas, None, rendezvous)


def _trace(
    host: LocalReplicas, fn: Callable[..., Any], arguments: Arguments
) -> tuple[Graph, OutputStructure]:
    start_logging()  # of the plan, and its checks
    trace = Trace(host.num_replicas_in_sync)
    with recording(trace):
        args, kwargs = arguments.placeholders(trace)
        returned, outputs = take_apart(call(fn, args, kwargs))
    graph = trace.finish(outputs)
    check_owner(host, _variables(passes.prune(graph)))
    return graph, returned


def _placed(host: LocalReplicas, graph: Graph) -> tuple[Graph, list[PlacementRow]]:
    """Give every node a device, by the names that each of the replicas calls its own."""
    places = host.places[0]
    placed, log = place(graph, places.home, list(places.names))
    report(log, places.names)
    return placed, log


def _optimized(graph: Graph) -> Graph:
    return passes.order_reads(passes.copy_reshapes(passes.optimize(graph)))


def _variables(graph: Graph) -> list[Variable]:
    """List the variables that a graph reads or changes, in the order in which it meets them."""
    found: dict[Variable, None] = {}
    for node in graph.nodes:
        read = node.attrs.get("variable")
        found.update(dict.fromkeys(() if read is None else (read,)))
        found.update(dict.fromkeys(node.attrs.get("changes", ())))
    return list(found)


def _settle(graph: Graph) -> None:
    """Move the variables of a step to their devices."""
    for node in graph.nodes:
        if "variable" in node.attrs:
            assert node.device is not None, node
            node.attrs["variable"].settle(node.device)


def _check_equal_changes(graph: Graph) -> None:
    varying = dependents(graph.nodes, of_replica)
    for node in graph.nodes:
        if node.op == "assign":
            check_equal(node, varying)


def _updates(host: LocalReplicas, graph: Graph) -> list[tuple[UpdateRule, ArenaPlan]]:
    """Return each `apply_gradients` node's arena, laid out in the order of its variables."""
    updates: list[tuple[UpdateRule, ArenaPlan]] = []
    changed: set[Variable] = set()
    for node in graph.nodes:
        if node.op != "apply_gradients":
            continue
        check_once(node, changed)
        rule = node.attrs["rule"]
        assert node.device is not None, node
        updates.append((rule, plan_for(host, rule, node.attrs["variables"], node.device)))
    return updates


def _program(graph: Graph) -> Program:
    program = schedule(graph)
    if pass_switches.is_on("plan_buffers"):
        program = plan_buffers(program)
    events.logger.debug("each replica runs\n%s", program)
    return program
