"""Cases: inputs, expected results, and their selection."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from measure.cases import COLLECTIVES, DTYPES, MIB, Array, Case, add_arguments, selected, size_name

from allreduce.comm import Communicator
from tests.harness import run_threads


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_exact_in_every_type(dtype: str, ranks: int) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    case = Case("all_reduce", dtype, ranks, 4096)
    exact = sum(case.source(rank).astype(np.float64) for rank in range(ranks))
    np.testing.assert_array_equal(case.expected(0).astype(np.float64), exact)
    assert len({case.source(rank).tobytes() for rank in range(ranks)}) == ranks


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_expected_is_what_members_compute(collective: str) -> None:
    case = Case(collective, "float32", 3, 4 * 31)
    if not hasattr(Communicator, collective):
        pytest.skip(f"there is no {collective}")

    def member(comm: Communicator) -> Array:
        out = np.empty(case.out_count, np.float32)
        getattr(comm, collective)(case.source(comm.rank), out=out)
        return out

    for rank, out in enumerate(run_threads(member, case.ranks)):
        np.testing.assert_array_equal(out, case.expected(rank))


def test_selection() -> None:
    options = _options("--collectives", "all_reduce", "broadcast", "--largest", str(MIB))
    chosen = [(case.collective, size_name(case.nbytes)) for case in selected(options, 2)]
    sizes = ["8 B", "256 B", "4 KiB", "32 KiB", "256 KiB", "1 MiB"]
    assert chosen == [("all_reduce", size) for size in sizes] + [
        ("broadcast", "256 KiB"),
        ("broadcast", "1 MiB"),
    ]


def test_what_memory_cannot_hold_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = _options("--collectives", "all_gather", "--smallest", str(64 * MIB))
    assert list(selected(options, 1000)) == []
    assert "left out: all_gather of 64 MiB on 1000 ranks" in capsys.readouterr().err
