"""Arrays larger than 4 GiB travel whole, by every transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.cases.huge_cases import COLLECTIVES
from tests.comm.ranks.pool import Runner, ranks_of

NEEDED = 14 << 30  # bytes: of two arrays and their shares, and what goes with them
BOTH = 20 << 30  # of two arrays and two results
KINDS = [
    ("shared", "private"),
    ("shared", "symmetric"),
    *((transport, "private") for transport in ("tcp", "hierarchical", "mpi")),
]

pytestmark = [pytest.mark.torture, pytest.mark.timeout(600)]


def available() -> int:
    """Return the bytes of memory that a program could still get."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def run(request: pytest.FixtureRequest) -> Iterator[tuple[Runner, str]]:
    transport, where = request.param
    if available() < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of free memory")
    hosts = "ab" if transport == "hierarchical" else "aa"
    with ranks_of(transport, hosts) as made:
        yield made, where


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_arrays_larger_than_4_gib(run: tuple[Runner, str], collective: str) -> None:
    case, where = run
    if collective == "all_to_all" and available() < BOTH:
        pytest.skip(f"needs {BOTH >> 30} GiB of free memory")
    case("huge", collective, where, timeout=500)
