"""Where to cut an arena into buckets, told from how long things were measured to take.

The model: a bucket's collective starts when its gradients are there and the one before it is over.
While the replica computes, a share of it goes on beside that; the rest of it is done when the
computation is over, and so are the updates, each when its collective is. The cuts with which the
last update is over first are the best, without those that make no difference.

Source of the question: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel
Training (VLDB 2020), section 3.2.3, where the size of buckets is left to the user.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Cuts = tuple[int, ...]  # the spans that buckets begin with, but for the first one


@dataclass(frozen=True, slots=True)
class Costs:
    """What a replica and its collectives were measured to take.

    Attributes:
        latency: Seconds of a collective, whatever its size.
        per_byte: Seconds more for each byte.
        beside: The share of a collective that goes on while the replica computes, from 0 to 1.
        update_per_byte: Seconds of an update.
    """

    latency: float
    per_byte: float
    beside: float
    update_per_byte: float


@dataclass(frozen=True, slots=True)
class Gradients:
    """When a step has its gradients.

    Attributes:
        nbytes: Of each span.
        ready: The seconds from the step's beginning until each is there.
        computed: And until nothing is left to compute but updates.
    """

    nbytes: tuple[int, ...]
    ready: tuple[float, ...]
    computed: float


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A range of spans: the first of them, all their bytes, and when the last one is ready."""

    first: int
    nbytes: int
    ready: float

    @classmethod
    def of(cls, step: Gradients, first: int, last: int) -> _Bucket:
        """Put the spans `first` to `last` (exclusive) together."""
        return cls(first, sum(step.nbytes[first:last]), max(step.ready[first:last]))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Cuts of the first spans, and when these buckets' last collective and update are over."""

    reduced: float
    updated: float
    cuts: Cuts = field(compare=False)

    def with_bucket(self, bucket: _Bucket, costs: Costs, computed: float) -> _Plan:
        """Add the next bucket."""
        start = max(self.reduced, bucket.ready)
        work = costs.latency + bucket.nbytes * costs.per_byte
        beside = max(0.0, computed - start) * costs.beside
        if costs.beside and work <= beside:
            reduced = start + work / costs.beside
        else:
            reduced = max(start, computed) + work - beside
        updated = max(self.updated, reduced, computed) + bucket.nbytes * costs.update_per_byte
        first = bucket.first
        return _Plan(reduced, updated, (*self.cuts, first) if first else self.cuts)

    def is_no_worse(self, other: _Plan) -> bool:
        return self.reduced <= other.reduced and self.updated <= other.updated


_UNITS = 16  # of a bucket as large as may be: cuts are told as exactly as that
_MOST_UNITS = 256  # of all of them: the search takes more than a second from a thousand places on
_NOTHING = _Plan(0.0, 0.0, ())


def modelled_end(step: Gradients, costs: Costs, cuts: Cuts) -> float:
    """Give the seconds from a step's beginning until the last update is over."""
    plan = _NOTHING
    for first, last in zip((0, *cuts), (*cuts, len(step.nbytes)), strict=True):
        plan = plan.with_bucket(_Bucket.of(step, first, last), costs, step.computed)
    return plan.updated


def choose_cuts(step: Gradients, costs: Costs, limit: int) -> Cuts:
    """Find the cuts with which a step is over first, by dynamic programming.

    Args:
        step: What was measured of it.
        costs: What was measured of collectives and updates.
        limit: The most bytes of a bucket of several spans.
    """
    places = _places(step, max(limit // _UNITS, sum(step.nbytes) // _MOST_UNITS))
    best: dict[int, list[_Plan]] = {place: [] for place in places}  # of the spans before each
    best[0] = [_NOTHING]
    for at, first in enumerate(places):
        for last in places[at + 1 :]:
            bucket = _Bucket.of(step, first, last)
            if last != places[at + 1] and bucket.nbytes > limit:
                break
            for plan in best[first]:
                _keep(best[last], plan.with_bucket(bucket, costs, step.computed))
    found = min(best[places[-1]], key=lambda plan: (plan.updated, len(plan.cuts)))
    return _needed(step, costs, limit, found.cuts)


def _needed(step: Gradients, costs: Costs, limit: int, cuts: Cuts) -> Cuts:
    """Leave out cuts without which a step ends no later."""
    end = modelled_end(step, costs, cuts)
    for cut in cuts:
        fewer = tuple(each for each in cuts if each != cut)
        first = max((each for each in fewer if each < cut), default=0)
        last = min((each for each in fewer if each > cut), default=len(step.nbytes))
        fits = sum(step.nbytes[first:last]) <= limit
        if fits and modelled_end(step, costs, fewer) <= end:
            cuts = fewer
    return cuts


def _places(step: Gradients, grain: int) -> list[int]:
    """List where cuts may be: what is small is not cut off its neighbours. First and last the ends.

    Among thousands of small spans the search would take seconds.
    """
    places, nbytes = [0], 0
    for index, size in enumerate(step.nbytes):
        if index and nbytes + size > grain:
            places.append(index)
            nbytes = 0
        nbytes += size
    return [*places, len(step.nbytes)]


def _keep(plans: list[_Plan], new: _Plan) -> None:
    """Keep a plan unless another one is in no respect worse, and it drops those that are worse."""
    if not any(each.is_no_worse(new) for each in plans):
        plans[:] = [each for each in plans if not new.is_no_worse(each)]
        plans.append(new)
