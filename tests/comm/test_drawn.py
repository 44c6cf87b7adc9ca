"""Any array on any transport: shapes, strides, counts and kinds of arrays that hypothesis finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allreduce.comm.calls.call import CARRIES, DTYPES
from tests.comm.cases.drawn import CUT, KINDS, LAYOUTS, WHOLE, Drawn
from tests.comm.cases.operator_cases import REDUCING
from tests.comm.ranks.pool import ranks_of

SIZE = 3
HOSTS = "aab"  # of hierarchical's ranks
COLLECTIVES = (
    *(*REDUCING, "all_gather", "gather", "scatter", "broadcast", "all_to_all"),
    "message",
)
SHARED_COUNTS = (*CUT, "all_gather", "gather")
SCALED = CARRIES["mean"]  # the types that factors make sense on
ROWS = st.one_of(st.integers(0, 5), st.sampled_from((300, 1025, 70001)))

Check = Callable[[Drawn], None]


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    """Draw a call that makes sense."""
    collective = draw(st.sampled_from(COLLECTIVES))
    dtype = draw(st.sampled_from(DTYPES[1:]))
    op = None
    if collective in REDUCING:
        op = draw(st.sampled_from(sorted(op for op, types in CARRIES.items() if dtype in types)))
    shape = draw(shapes(whole=collective in (*WHOLE, "message")))
    counts, items = None, list[tuple[str, tuple[int, ...]]]()
    if collective in SHARED_COUNTS and draw(st.booleans()):
        counts = tuple(draw(st.lists(ROWS, min_size=SIZE, max_size=SIZE)))
    if collective in WHOLE and draw(st.booleans()):
        types = st.sampled_from(sorted(DTYPES[1:] if op is None else CARRIES[op]))
        items = draw(st.lists(st.tuples(types, shapes(whole=True)), max_size=3))
    scale = (1.0, 1.0)
    if op in ("sum", "mean") and SCALED.issuperset((dtype, *(name for name, _ in items))):
        factors = st.sampled_from((1.0, 0.5, -2.0))
        scale = draw(st.tuples(factors, factors))
    return Drawn(
        *(collective, op, dtype, shape, counts, draw(st.integers(0, SIZE - 1))),
        layout=draw(st.sampled_from(LAYOUTS)),
        kind=draw(st.sampled_from(KINDS)),
        into=draw(st.sampled_from((None, *LAYOUTS[:-1]))),
        items=tuple(items),
        scale=scale,
        started=draw(st.booleans()),
    )


@st.composite
def shapes(draw: st.DrawFn, whole: bool) -> tuple[int, ...]:
    """Draw a shape; where the array stays whole, that of a number too."""
    first = draw(ROWS)
    rest = draw(st.lists(st.integers(0, 3), max_size=2)) if first < 1000 else []
    return () if whole and first == 0 and draw(st.booleans()) else (first, *rest)


@pytest.fixture(scope="module", params=["shared", "tcp", "hierarchical", "mpi"])
def check(request: pytest.FixtureRequest) -> Iterator[Check]:
    """Make a call on all ranks of a job that lives through all examples."""
    hosts = HOSTS if request.param == "hierarchical" else "aaa"
    wrong: list[str] = []

    def run(call: Drawn) -> None:
        if wrong:  # a failed communicator reports no more
            raise AssertionError(wrong)
        try:
            wrong.extend(filter(None, ask("any_call", asdict(call))))
        except AssertionError as error:
            wrong.append(str(error))
        assert not wrong

    with ranks_of(request.param, hosts) as ask:
        yield run


@settings(max_examples=12)
@given(calls())
def test_any_array(check: Check, call: Drawn) -> None:
    check(call)


@pytest.mark.torture
@pytest.mark.timeout(1200)
@settings(derandomize=False, max_examples=3000)
@given(calls())
def test_any_array_for_long(check: Check, call: Drawn) -> None:
    check(call)
