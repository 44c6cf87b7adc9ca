"""Where an optimizer's buckets are cut anew, as the first steps were measured.

In a few of the first steps with an arena rank 0 notes when its first replica has each gradient;
then all replicas together measure what a collective takes. Rank 0 chooses the cuts and tells the
others, before the step in which they hold; the arena stays as it is laid out. In shared memory, and
among two members, sums add element by element in the order of members, so that the bits do not
depend on where buckets are cut. A ring of TCP adds each slice in another order, and its slices move
with the cuts: there, `ar.config.set_buckets` gives bits that can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from allreduce import events
from allreduce.comm import adopt
from allreduce.devices import options
from allreduce.errors import InternalError
from allreduce.graph import passes
from allreduce.graph.frame import Frame
from allreduce.graph.ops.base import lookup
from allreduce.graph.probing import costs_of
from allreduce.graph.replicas import current_steps
from allreduce.graph.update import UpdateRule
from allreduce.reduction import (
    BUCKET_BYTES,
    Costs,
    Cuts,
    Gradients,
    Layout,
    choose_cuts,
    cut_buckets,
    modelled_end,
    span_bytes,
)

if TYPE_CHECKING:
    from allreduce.graph.arena_plan import ArenaPlan, Host
    from allreduce.graph.compiled import Compiled

T = TypeVar("T")

# Of an arena's updates, from 1. In the first one memory is touched for the first time.
_MEASURED = range(2, 5)
_CHANGES = 5
# An arena of fewer bytes stays as it is: there is less to hide than a step's own noise.
_WORTH_CUTTING = 1 << 20
# Of a step's time: as much the model has to promise, as what it knows is only measured.
_LEAST_GAIN = 0.05


@dataclass(slots=True)
class Cutting:
    """What is known of where to cut an arena, until that is decided.

    Attributes:
        updates: Steps so far.
        steps: When the measured ones had their gradients.
        updating: The seconds for each byte of their updates.
    """

    updates: int = 0
    steps: list[Gradients] = field(default_factory=list)
    updating: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Layout, replicas: int) -> Cutting | None:
        """Begin for an arena, if its cuts are to be measured."""
        free = options.current().buckets is None and passes.is_on("bucket") and replicas > 1
        large = len(layout.spans) > 1 and sum(span_bytes(layout)) >= _WORTH_CUTTING
        return cls() if free and large else None

    def note(self, plan: ArenaPlan, frame: Frame, ends: dict[int, tuple[float, float]]) -> None:
        """Keep when a step had its gradients, if it had samples.

        Args:
            plan: Whose arena it is.
            frame: That ran the step.
            ends: When each instruction ended, and its seconds, by node.
        """
        assert frame.took is not None, "it has just run"
        ready = [0.0] * len(plan.layout.spans)
        found, updating, computed = 0, 0.0, frame.took.began
        for node in (each.node for each in frame.program.instructions):
            end, seconds = ends.get(node.id, (0.0, 0.0))
            if lookup(node.op).kind == "compute" or node.op == "store_gradient":
                computed = max(computed, end)
            if node.attrs.get("plan") is not plan:
                continue
            if node.op in ("update_bucket", "update_own"):
                updating += seconds
            elif node.op == "store_gradient":
                # What is computed where it is reduced needs no store.
                end = end or ends.get(node.inputs[0], (0.0, 0.0))[0]
                ready[node.attrs["span"]] = max(0.0, end - frame.took.began)
                found += bool(end)
        if found == len(ready):
            nbytes = span_bytes(plan.layout)
            whole = Gradients(tuple(nbytes), tuple(ready), computed - frame.took.began)
            self.steps.append(whole)
            self.updating.append(updating / sum(nbytes))

    def usual(self) -> Gradients:
        """Give the medians of all measured steps."""
        ready = zip(*(each.ready for each in self.steps), strict=True)
        return Gradients(
            self.steps[0].nbytes,
            tuple(map(median, ready)),
            median(each.computed for each in self.steps),
        )


def prepare(host: Host, updates: Sequence[tuple[UpdateRule, ArenaPlan]]) -> None:
    """Before updates: count them, and cut buckets anew where it is time, all ranks together.

    Eager steps count as well, as one rank may run them beside compiled ones of the others.
    """
    for rule, plan in updates:
        if plan.cutting is None:
            continue
        plan.cutting.updates += 1
        if plan.cutting.updates >= _CHANGES:
            _decide(host, rule, plan, plan.cutting)
            plan.cutting = None


def measured(host: Host, compiled: Compiled, run: Callable[[], T]) -> T:
    """Run a step; notes when its first replica has its gradients, if that is to be measured."""
    cuttings = [
        (plan, plan.cutting)
        for _, plan in compiled.updates
        if plan.cutting is not None and plan.cutting.updates in _MEASURED
    ]
    replica = host.replicas[0].id
    if not cuttings or replica != 0:
        return run()
    ends: dict[int, tuple[float, float]] = {}
    here = current_steps()

    def listen(event: events.Event) -> None:
        if current_steps() != here:  # other replicas' step, in another thread
            return
        if event.fields.get("replica") == replica and "node" in event.fields:
            ends[event.fields["node"]] = event.start + event.seconds, event.seconds

    stop = events.subscribe(listen)
    try:
        result = run()
    finally:
        stop()
    frame = compiled.executors[0].latest
    assert frame is not None, "it has just run"
    for plan, cutting in cuttings:
        cutting.note(plan, frame, ends)
    return result


def _decide(host: Host, rule: UpdateRule, plan: ArenaPlan, cutting: Cutting) -> None:
    """Have rank 0 choose, and all replicas follow."""
    present = tuple(each.first for each in plan.buckets[1:])

    def hear(index: int) -> tuple[np.ndarray, str]:
        replica, because = host.replicas[index], "rank 0 has measured it"
        assert replica.communicator is not None, "one of several"
        costs = costs_of(replica.communicator, plan.arenas[index].gradients)
        told = np.full(len(plan.layout.spans) + 1, -1, np.int64)
        if replica.id == 0:  # the others wait for it, and hear of an error here
            cuts, because = _chosen(cutting, costs, present)
            told[: len(cuts) + 1] = cutting.updates, *cuts
        adopt(replica.communicator, "where buckets are cut", told)
        return told, because

    told, because = host.on_replicas(hear)[0]
    step, *heard = map(int, told)
    if step != cutting.updates:
        raise InternalError(
            f"buckets are cut anew in update {step} on rank 0 but {cutting.updates} here"
        )
    cuts = tuple(each for each in heard if each >= 0)
    if cuts == present:
        plan.because = because
    else:
        plan.cut_anew(host, rule, cut_buckets(plan.layout, cuts), because)
    events.logger.info(
        "%s: from update %d on, %s %s, %s; ar.config.set_buckets(%r) fixes them (of several "
        "optimizers, with the names of all in one list)",
        type(rule).__name__,
        step,
        events.counted(len(cuts) + 1, "bucket"),
        "as before" if cuts == present else f"instead of {len(present) + 1}",
        because,
        [plan.layout.spans[i].name for i in (0, *cuts)],  # the first says whose they are
    )


def _chosen(cutting: Cutting, costs: Costs | None, present: Cuts) -> tuple[Cuts, str]:
    """Choose the cuts that the model promises most of, and say why."""
    if costs is None:
        noise = "a large collective took no longer than a small one"
        return present, f"as {noise}: other programs run, too"
    if not cutting.steps:
        return present, "as no step told when its gradients are there"
    step = cutting.usual()
    costs = Costs(costs.latency, costs.per_byte, costs.beside, median(cutting.updating))
    cuts = choose_cuts(step, costs, BUCKET_BYTES)
    before, after = (modelled_end(step, costs, each) for each in (present, cuts))
    measured = (
        f"a collective takes {costs.latency * 1e6:.0f} us and {costs.per_byte * 2**20 * 1e6:.0f} "
        f"us per MiB, {costs.beside:.0%} of it beside a computation"
    )
    if cuts == present or after > before * (1 - _LEAST_GAIN):
        gain = "others promise too little beside"
        return present, f"as {gain} the {before * 1e3:.2f} ms that a step should take ({measured})"
    promised = f"as a step should take {after * 1e3:.2f} ms instead of {before * 1e3:.2f}"
    return cuts, f"{promised} ({measured})"
