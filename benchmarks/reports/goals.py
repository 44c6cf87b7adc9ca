"""Goals as data, and the measured figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from measure.alternation import Measured
from measure.revision import Revision
from trainers import TRAINERS
from workloads import WORKLOADS

# The case, how many processes of each, the peer: how many times our samples per second are the
# peer's at least.
RATIOS = {
    ("mlp", 1, "numpy"): 1 / 1.05,
    ("mlp", 1, "pytorch"): 1.3,
    ("mlp", 2, "pytorch"): 1.6,
    ("small", 1, "pytorch"): 4.0,
    ("conv", 2, "pytorch"): 1.2,
    ("conv", 2, "tensorflow"): 1.2,
    ("transformer", 2, "pytorch"): 1.2,
    ("chain", 1, "numpy"): 4.0,
    ("adam", 2, "pytorch"): 4.0,
    ("mlp-clipped", 2, "pytorch-fused"): 1.8,
}
# Without a peer: the goal, and whether it is an upper limit.
FIGURES = {
    "weak scaling": (0.95, False),
    "reduce, clip and update: PyTorch, fused Adam ÷ ours": (3.0, False),
    "samples/s of 2 devices ÷ of one": (1.8, False),
    "of the memory's bandwidth": (0.7, False),
    "step ÷ longer of input and compute": (1.05, True),
    "peak memory ÷ liveness bound": (1.1, True),
    "µs per instruction": (0.5, True),
    "samples/s of 8 processes ÷ of 2": (0.9, False),
}
# The speed of independent processes bounds all others.
_APART = ("apart", "threads", "bandwidth")  # sides with other work than the rest
_SCALING = {"ours": "weak scaling", "apart": "weak scaling without communication"}
# Sides whose samples per second are reported as a multiple of one separate replica's, and the
# label.
_MULTIPLES = {"devices": "devices", "threads": "threads that never meet"}


@dataclass(frozen=True)
class Standing:
    """One side in one case, and ours with as many processes."""

    case: str
    contestant: str
    ranks: int
    about: str  # the library's own words
    steps: int
    median: float  # seconds
    p99: float  # seconds
    rate: float  # samples per second of all processes together
    ratio: float | None  # its median divided by ours
    goal: float | None  # of the ratio
    losses: list[float]  # of the first steps
    revision: Revision

    @property
    def met(self) -> bool | None:
        """Whether ours reaches its goal here; None where there is none."""
        return None if self.goal is None or self.ratio is None else self.ratio >= self.goal


@dataclass(frozen=True)
class Figure:
    """Something else that was measured."""

    case: str
    what: str
    value: float
    goal: float | None
    most: bool  # whether the goal is the most that it may be
    revision: Revision

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.most else self.value >= self.goal


def standings(case: str, found: Sequence[Measured], revision: Revision) -> list[Standing]:
    """Compare the sides of a case with ours."""
    workload = WORKLOADS[case]
    ours = {each.ranks: each.median for each in found if each.trainer == "ours"}
    made = []
    for each in found:
        ratio = None
        if each.trainer != "ours" and each.ranks in ours:
            ratio = each.median / ours[each.ranks]
        made.append(
            Standing(
                workload.title,
                TRAINERS[each.trainer].title,
                each.ranks,
                each.about,
                len(each.seconds),
                each.median,
                each.p99,
                workload.samples(each.ranks) / each.median,
                ratio,
                RATIOS.get((case, each.ranks, each.trainer)),
                each.losses,
                revision,
            )
        )
    return made


def figures(case: str, found: Sequence[Measured], revision: Revision) -> list[Figure]:
    """Return the other figures of a case's sides."""
    title = WORKLOADS[case].title
    return [
        Figure(title, f"{what}{detail}", value, *_goal(what), revision)
        for what, detail, value in _figures(case, found)
    ]


def _goal(what: str) -> tuple[float | None, bool]:
    return FIGURES.get(what, (None, False))


def _figures(case: str, found: Sequence[Measured]) -> Iterator[tuple[str, str, float]]:
    """Yield the quantity, a detail, and the value."""
    medians = {(each.trainer, each.ranks): each.median for each in found}
    for trainer, ranks in medians:
        alone = medians.get(("ours" if trainer in (*_SCALING, *_MULTIPLES) else trainer, 1))
        if alone is not None and trainer in _MULTIPLES:
            what = f"samples/s of {ranks} {_MULTIPLES[trainer]} ÷ of one"
            yield what, "", ranks * alone / medians[trainer, ranks]
        elif alone is not None and ranks > 1:
            yield (
                _SCALING.get(trainer, f"weak scaling of {trainer}"),
                "",
                alone / medians[trainer, ranks],
            )
    after = {TRAINERS[each.trainer].title: each.after for each in found if each.after is not None}
    ours = after.pop("ours", 0.0)
    yield from (
        (f"reduce, clip and update: {name} ÷ ours", "", s / ours) for name, s in after.items()
    )
    if ("bandwidth", 1) in medians:
        yield "of the memory's bandwidth", "", medians["bandwidth", 1] / medians["ours", 1]
    if ("ours", 8) in medians:
        many, few = (WORKLOADS[case].samples(n) / medians["ours", n] for n in (8, 2))
        yield "samples/s of 8 processes ÷ of 2", "", many / few
    for each in found:
        told = each.figures
        if "bound" in told and each.trainer == "ours":
            detail = f", {each.ranks} processes" if each.ranks > 1 else ""
            yield "peak memory ÷ liveness bound", detail, told["peak"] / told["bound"]
        for kind in ("waits", "computes"):
            if kind in told:
                yield "step ÷ longer of input and compute", f", input {kind}", told[kind]
        if "instruction" in told:
            yield "µs per instruction", ", kernel included", told["instruction"] * 1e6


def check_losses(case: str, found: Iterable[Measured]) -> None:
    """Check that all sides of a case with as many processes do the same work.

    Raises:
        AssertionError: Losses of the first steps differ by more than the case allows.
    """
    agreement = WORKLOADS[case].agreement
    first: dict[int, Measured] = {}
    for each in found:
        beside = first.setdefault(each.ranks, each)
        if agreement is None or each.trainer in _APART:
            continue
        for step, (mine, other) in enumerate(zip(each.losses, beside.losses, strict=True)):
            assert abs(mine - other) <= agreement * max(abs(mine), abs(other)), (
                f"{case}: step {step} of {each.trainer} has the loss {mine}, and of "
                f"{beside.trainer} {other}, on {each.ranks} processes"
            )
