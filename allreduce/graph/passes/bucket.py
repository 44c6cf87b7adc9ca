"""Turn "apply these gradients" into stores, and an all-reduce and an update per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from allreduce.graph.node import Graph, Node, Rewriter
from allreduce.graph.ops.base import lookup
from allreduce.reduction import Bucket, Layout


class Plan(Protocol):
    """How one optimizer's variables lie in its arena."""

    @property
    def layout(self) -> Layout: ...
    @property
    def buckets(self) -> Sequence[Bucket]: ...
    @property
    def variables(self) -> Sequence[Any]: ...


def bucket(graph: Graph, plans: Sequence[Plan], replicas: int) -> Graph:
    """Replace each `apply_gradients` node.

    Args:
        graph: A graph in which `order_reads` has put changes behind readers.
        plans: The arena's plan for each `apply_gradients` node, in their order.
        replicas: How many take part; a single one has nothing to reduce.
    """
    rewriter = Rewriter(graph)
    pending = iter(plans)
    effects: list[int] = []
    updates: dict[int, dict[Any, int]] = {}  # of each old node: the update of each variable
    for node in graph.nodes:
        if node.op == "apply_gradients":
            updates[node.id] = _expand(rewriter, node, next(pending), replicas > 1)
            made = list(dict.fromkeys(updates[node.id].values()))
            rewriter.moved[node.id] = made[-1]
            effects += made
            continue
        rewriter.keep(node, control=_control(rewriter, node, updates))
        effects += [rewriter.moved[node.id]] if node.id in graph.effects else []
    return rewriter.finish(effects)


def _control(rewriter: Rewriter, node: Node, updates: dict[int, dict[Any, int]]) -> tuple[int, ...]:
    """Let a later read wait for the update of its own variable, and anything else for all."""
    control: list[int] = []
    for i in node.control:
        if i not in updates:
            control.append(rewriter.moved[i])
        elif node.op == "read":
            control.append(updates[i][node.attrs["variable"]])
        else:
            control += updates[i].values()
    return tuple(dict.fromkeys(control))


def _expand(rewriter: Rewriter, node: Node, plan: Plan, reduce: bool) -> dict[Any, int]:
    """Add the nodes that a plan's gradients need; returns the update of each variable."""
    count, *gradients = (rewriter.moved[i] for i in node.inputs)
    places = {variable: i for i, variable in enumerate(plan.variables)}
    stores: dict[int, int] = {}
    for gradient, variable in zip(gradients, node.attrs["variables"], strict=True):
        attrs = {"plan": plan, "span": places[variable]}
        stores[places[variable]] = _add(rewriter, node, "store_gradient", (gradient,), attrs, ())
    counted = _add(rewriter, node, "store_count", (count,), {"plan": plan}, ())
    first = counted  # the sum of counts comes with the first bucket, so every update waits for it
    readers, order = _readers(rewriter, node, plan), _order(rewriter, node)
    updates: dict[Any, int] = {}
    for part in plan.buckets:
        ready = [stores[i] for i in range(part.first, part.last)]
        ready += [counted] if part.index == 0 else []
        attrs = {"plan": plan, "bucket": part, "rule": node.attrs["rule"]}
        if reduce:
            ready = [_add(rewriter, node, "all_reduce_bucket", (), attrs, ready)]
            first = ready[0] if part.index == 0 else first
        changed = tuple(plan.variables[part.first : part.last])
        reads = sorted({i for variable in changed for i in readers[variable]})
        waits = [*ready, first, *reads, *order]
        attrs = {**attrs, "changes": changed}
        update = _add(rewriter, node, "update_bucket", (), attrs, waits)
        updates.update(dict.fromkeys(changed, update))
    return updates


def _readers(rewriter: Rewriter, node: Node, plan: Plan) -> dict[Any, list[int]]:
    """Find, among the nodes this change has to wait for, those that read each variable."""
    waited, mine = set(node.control), set(plan.variables)
    memory: dict[int, Any] = {}  # the variable that a node's value is, as read or as a view of that
    found: dict[Any, list[int]] = {variable: [] for variable in plan.variables}
    for old in rewriter.old.nodes[: node.id]:
        if old.op == "read" and old.attrs["variable"] in mine:
            memory[old.id] = old.attrs["variable"]
        uses = {memory[i]: None for i in (old.id, *old.inputs) if i in memory}
        if uses and lookup(old.op).view:
            memory[old.id] = next(iter(uses))
        for variable in uses if old.id in waited else ():
            found[variable].append(rewriter.moved[old.id])
    return found


def _order(rewriter: Rewriter, node: Node) -> list[int]:
    effects = set(rewriter.old.effects)
    return [rewriter.moved[i] for i in node.control if i in effects]


def _add(
    rewriter: Rewriter,
    like: Node,
    op: str,
    inputs: tuple[int, ...],
    attrs: dict[str, Any],
    control: Sequence[int],
) -> int:
    edges = tuple(dict.fromkeys(control))
    return rewriter.add(like, op=op, inputs=inputs, attrs=attrs, control=edges)
