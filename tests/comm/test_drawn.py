"""Any array on any transport: shapes, strides, counts and kinds of arrays that hypothesis finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.comm.drawn import CUT, FOLDS, KINDS, LAYOUTS, REDUCING, Drawn
from tests.comm.pool import ProcessPool
from tests.harness import explicit_ranks

SIZE = 3
HOSTS = "aab"  # of hierarchical's ranks
COLLECTIVES = (*REDUCING, *("all_gather", "gather", "scatter", "broadcast", "all_to_all"))
DTYPES = ("float32", "float64", "float16", "int32", "uint8", "bool", "complex64")
SHARED_COUNTS = (*CUT, "all_gather", "gather")
ROWS = st.one_of(st.integers(0, 5), st.sampled_from((300, 1025, 70001)))

Check = Callable[[Drawn], None]


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    """Draw a call that makes sense."""
    collective = draw(st.sampled_from(COLLECTIVES))
    dtype = draw(st.sampled_from(DTYPES))
    op = draw(st.sampled_from(sorted(FOLDS))) if collective in REDUCING else None
    if op is not None and dtype == "complex64":
        op = "sum"
    if (op == "bitwise_xor" and dtype not in ("int32", "uint8")) or dtype == "bool":
        op = op and "logical_and"
    first = draw(ROWS)
    rest = draw(st.lists(st.integers(0, 3), max_size=2)) if first < 1000 else []
    whole = collective in ("all_reduce", "reduce", "broadcast")
    shape = () if whole and draw(st.booleans()) and first == 0 else (first, *rest)
    counts = None
    if collective in SHARED_COUNTS and draw(st.booleans()):
        counts = tuple(draw(st.lists(ROWS, min_size=SIZE, max_size=SIZE)))
    return Drawn(
        *(collective, op, dtype, shape, counts, draw(st.integers(0, SIZE - 1))),
        layout=draw(st.sampled_from(LAYOUTS)),
        kind=draw(st.sampled_from(KINDS)),
        into=draw(st.sampled_from((None, *LAYOUTS[:-1]))),
    )


@pytest.fixture(scope="module", params=["shared", "tcp", "hierarchical"])
def check(request: pytest.FixtureRequest) -> Iterator[Check]:
    """Make a call on all ranks of a job that lives through all examples."""
    placed = request.param == "hierarchical"
    own = [{"ALLREDUCE_HOST": host} if placed else {} for host in HOSTS]
    ranks = [
        ({**explicit, **host}, ()) for explicit, host in zip(explicit_ranks(SIZE), own, strict=True)
    ]
    pool = ProcessPool(SIZE, request.param, ranks)

    def run(call: Drawn) -> None:
        assert not [wrong for wrong in pool.run("any_call", asdict(call)) if wrong]

    yield run
    assert pool.close() == [0] * SIZE


@settings(deadline=None, derandomize=True, max_examples=25)
@given(calls())
def test_any_array(check: Check, call: Drawn) -> None:
    check(call)


@pytest.mark.torture
@pytest.mark.timeout(1200)
@settings(deadline=None, max_examples=3000, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_any_array_for_long(check: Check, call: Drawn) -> None:
    check(call)
