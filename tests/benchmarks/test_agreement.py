"""Upper bounds of the cost of comparing calls, in a real job."""

from __future__ import annotations

import re
import sys

from measure.environments import REPOSITORY

from tests.cluster.processes import run

SCRIPT = str(REPOSITORY / "benchmarks" / "agreement.py")


def test_a_call_of_nothing_is_timed_beside_a_large_one() -> None:
    command = [sys.executable, "-m", "allreduce.run", "-n", "2", SCRIPT]
    result = run([*command, "--nbytes", "65536", "--seconds", "0.001"], deadline=60)
    assert result.code == 0, result.err
    found = re.findall(r"(64 KiB|0 B) (comm.empty|ordinary): ([\d.]+) ", result.out)
    assert [row[:2] for row in found] == [
        *(("64 KiB", "comm.empty"), ("64 KiB", "ordinary")),
        *(("0 B", "comm.empty"), ("0 B", "ordinary")),
    ]
    assert all(float(row[2]) > 0 for row in found)
    assert result.out.count("; the check takes less than ") == 2
