"""The report of a sampled rank."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from measure.environments import REPOSITORY
from sampling import shares

from tests.cluster.processes import run

SCRIPT = str(REPOSITORY / "benchmarks" / "sampling.py")

REPORT = """
# Overhead  Symbol                                         IPC   [IPC Coverage]
# ........  .............................................  ....................
#
    43.91%  [.] allreduce::avx2::(anonymous namespace)::reduce<allreduce::Sum>  -      -
    10.02%  [k] _copy_to_iter                                                   -      -
     0.80%  [.] allreduce::post                                                 -      -
"""


def test_functions_of_some_weight_are_told_by_their_own_names() -> None:
    assert shares(REPORT) == [(0.4391, "reduce<Sum>"), (0.1002, "_copy_to_iter (kernel)")]


@pytest.mark.skipif(shutil.which("perf") is None, reason="needs Linux's perf")
def test_a_rank_is_sampled_while_all_repeat_a_call() -> None:
    command = [sys.executable, SCRIPT, "all_gather", "--nbytes", "4096", "--seconds", "0.2"]
    result = run(command, deadline=60)
    if "perf_event_paranoid" in result.out + result.err:
        pytest.skip("this user may not sample")
    assert result.code == 0, result.err
    assert re.search(r"[\d.]+ us the call", result.out)
    if "perf took no samples" in result.out:
        pytest.skip("perf took no samples on this machine")
    assert re.search(r"[\d.]+ us +\d+%  \S", result.out), "no function was sampled"
