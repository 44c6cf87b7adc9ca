"""Replace "apply these gradients" by stores, and an all-reduce and an update per bucket.

A sharded update is one operation, or two if the norm of all gradients comes between sums and
updates; or the update of the own slice between a reduce-scatter (or an all-reduce) and an
all-gather. The header is then reduced separately and first, because every slice needs the sample
count and the checksum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup
from allreduce.reduction import Bucket, Layout, ShardMode, header_alone

_SENT = (ShardMode.SCATTERED, ShardMode.SUMMED)
_REDUCING: Mapping[ShardMode | None, str | None] = {
    None: "all_reduce_bucket",
    ShardMode.MAPPED: None,  # as it updates, if it need not know the norm
    ShardMode.SCATTERED: "reduce_scatter_bucket",
    ShardMode.SUMMED: "all_reduce_bucket",
}
_CHANGING: Mapping[ShardMode | None, str] = {
    None: "update_bucket",
    ShardMode.MAPPED: "update_slices",
    ShardMode.SCATTERED: "all_gather_bucket",
    ShardMode.SUMMED: "all_gather_bucket",
}


class Plan(Protocol):
    """The layout of one optimizer's variables."""

    @property
    def layout(self) -> Layout: ...
    @property
    def buckets(self) -> Sequence[Bucket]: ...
    @property
    def sharded(
        self,
    ) -> Mapping[int, ShardMode]: ...  # the buckets that are updated in slices, by index
    @property
    def variables(self) -> Sequence[Any]: ...
    @property
    def wire(self) -> str | None: ...  # the dtype of exchanged gradients, if it is another one


def bucket(graph: Graph, plans: Sequence[Plan], replicas: int) -> Graph:
    """Replace each `apply_gradients` node.

    Args:
        graph: A graph after `order_reads`.
        plans: The arena's plan for each `apply_gradients` node, in order.
        replicas: The number of replicas; a single one reduces nothing.
    """
    rewriter = Rewriter(graph)
    pending = iter(plans)
    effects: list[int] = []
    updates: dict[int, dict[Any, int]] = {}  # of each old node: the update of each variable
    for node in graph.nodes:
        if node.op == "apply_gradients":
            updates[node.id], made = _expand(rewriter, node, next(pending), replicas > 1)
            rewriter.moved[node.id] = made[-1]
            effects += made
            continue
        rewriter.keep(node, control=_control(rewriter, node, updates))
        effects += [rewriter.moved[node.id]] if node.id in graph.effects else []
    return rewriter.finish(effects)


def _control(rewriter: Rewriter, node: Node, updates: dict[int, dict[Any, int]]) -> tuple[int, ...]:
    """Let a later read wait for the update of its own variable, and other nodes for all updates."""
    control: list[int] = []
    for i in node.control:
        if i not in updates:
            control.append(rewriter.moved[i])
        elif node.op == "read":
            control.append(updates[i][node.attrs["variable"]])
        else:
            control += updates[i].values()
    return tuple(dict.fromkeys(control))


def _expand(
    rewriter: Rewriter, node: Node, plan: Plan, reduce: bool
) -> tuple[dict[Any, int], list[int]]:
    """Add the nodes that a plan's gradients need.

    Returns:
        The update of each variable, and all nodes that change something.
    """
    stores, counted = _stores(rewriter, node, plan)
    # The sum of counts comes with the first bucket, so every update waits for it.
    first = summed = counted
    readers, order = _readers(rewriter, node, plan), _order(rewriter, node)
    updates: dict[Any, int] = {}
    made: list[int] = []
    parts = _parts(plan, reduce)
    # All sums precede the first update: ranks start collectives in the order of recording, and one
    # of them may end an update.
    ready = [_written(part, stores, counted) for part in parts]
    if reduce:
        ready = [_summed(rewriter, node, plan, *each) for each in zip(parts, ready, strict=True)]
    if node.attrs["rule"].clip_norm is not None:  # one norm of all gradients, before any update
        sums = [i for each in ready for i in each]
        attrs = {"plan": plan, "rule": node.attrs["rule"]}
        op = "all_reduce_norm" if reduce and plan.sharded else "gradient_norm"
        norm = _add(rewriter, node, op, (), attrs, [*sums, counted])
        ready = [[*each, norm] for each in ready]
    for part, before in zip(parts, ready, strict=True):
        if part.has_header and reduce:
            first = summed = before[0]
        mode = _mode(plan, part) if reduce else None
        changed = tuple(plan.variables[part.first : part.last])
        reads = sorted({i for variable in changed for i in readers[variable]})
        waits = [*before, summed if mode is ShardMode.MAPPED else first, *reads, *order]
        attrs = {"plan": plan, "bucket": part, "rule": node.attrs["rule"], "changes": changed}
        if mode in _SENT:
            attrs["mode"] = mode
            waits = [_add(rewriter, node, "update_own", (), attrs, waits)]
        made.append(_add(rewriter, node, _CHANGING[mode], (), attrs, waits))
        if not changed:  # it has only checked the sums
            first = made[-1]
        updates.update(dict.fromkeys(changed, made[-1]))
    return updates, made


def _written(part: Bucket, stores: Mapping[int, int], counted: int) -> list[int]:
    """Find the node that writes a bucket."""
    written = [stores[i] for i in range(part.first, part.last)]
    return [*written, counted] if part.has_header else written


def _summed(
    rewriter: Rewriter, node: Node, plan: Plan, part: Bucket, written: list[int]
) -> list[int]:
    """Add the reduction of a bucket; return the nodes that its update must wait for."""
    mode = _mode(plan, part)
    op, rule = _REDUCING[mode], node.attrs["rule"]
    if mode is ShardMode.MAPPED and rule.clip_norm is not None:
        op = "sum_slices"
    attrs = {"plan": plan, "bucket": part, "rule": rule}
    if plan.wire and mode is None and not part.has_header:
        attrs["wire"] = plan.wire
    return written if op is None else [_add(rewriter, node, op, (), attrs, written)]


def _mode(plan: Plan, part: Bucket) -> ShardMode | None:
    """Describe how a bucket is updated in slices; the header alone is not."""
    return plan.sharded.get(part.index) if part.first < part.last else None


def _stores(rewriter: Rewriter, node: Node, plan: Plan) -> tuple[dict[int, int], int]:
    """Add the stores of the gradients, by their place in the arena, and of the count."""
    places = {variable: i for i, variable in enumerate(plan.variables)}
    before: tuple[int, ...] = ()
    if _adds(node):
        before = (_add(rewriter, node, "clear_gradients", (), {"plan": plan}, ()),)
    if not node.inputs:  # an update with the gradients of earlier steps
        return dict.fromkeys(places.values(), before[0]), before[0]
    count, *gradients = (rewriter.moved[i] for i in node.inputs)
    stores: dict[int, int] = {}
    for gradient, variable in zip(gradients, node.attrs["variables"], strict=True):
        attrs = {"plan": plan, "span": places[variable]}
        place = places[variable]
        stores[place] = _add(rewriter, node, "store_gradient", (gradient,), attrs, before)
    return stores, _add(rewriter, node, "store_count", (count,), {"plan": plan}, before)


def _parts(plan: Plan, reduce: bool) -> list[Bucket]:
    """List the buckets; first the header, if it is separate."""
    modes = plan.sharded
    apart = ShardMode.MAPPED in modes.values() or modes.get(0) is ShardMode.SCATTERED
    if not reduce or not (apart or plan.wire):
        return list(plan.buckets)
    others = (replace(each, start=each.parameters_start) for each in plan.buckets)
    return [header_alone(plan.layout), *others]


def _readers(rewriter: Rewriter, node: Node, plan: Plan) -> dict[Any, list[int]]:
    """Find the readers of each variable among the nodes this change must wait for."""
    waited, mine = set(node.control), set(plan.variables)
    memory: dict[int, Any] = {}  # the variable that a node's value is, as read or as a view of that
    found: dict[Any, list[int]] = {variable: [] for variable in plan.variables}
    for old in rewriter.old.nodes[: node.id]:
        if old.op == "read" and old.attrs["variable"] in mine:
            memory[old.id] = old.attrs["variable"]
        uses = {memory[i]: None for i in (old.id, *old.inputs) if i in memory}
        if uses and lookup(old.op).view:
            memory[old.id] = next(iter(uses))
        # A view only says where its readers look; they are waited for themselves.
        looks = lookup(old.op).view is not None
        for variable in uses if old.id in waited and not looks else ():
            found[variable].append(rewriter.moved[old.id])
    return found


def _order(rewriter: Rewriter, node: Node) -> list[int]:
    """Find the effect before this one; updates do not count, as they change other variables."""
    old, found = rewriter.old, []
    effects = set(old.effects)
    waits = [i for i in node.control if i in effects]
    while waits:
        i = waits.pop()
        if old.nodes[i].op == "apply_gradients":
            waits += [each for each in old.nodes[i].control if each in effects]
        else:
            found.append(rewriter.moved[i])
    return found


def _adds(node: Node) -> bool:
    """Return whether gradients are added up over several steps; see accumulation.py."""
    return node.attrs["rule"].gradient_accumulation > 1 or not node.inputs


def _add(
    rewriter: Rewriter,
    like: Node,
    op: str,
    inputs: tuple[int, ...],
    attrs: dict[str, Any],
    control: Sequence[int],
) -> int:
    edges = tuple(dict.fromkeys(control))
    attrs = {**attrs, "adds": True} if _adds(like) else attrs
    return rewriter.add(like, op=op, inputs=inputs, attrs=attrs, control=edges)
