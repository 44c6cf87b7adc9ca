"""Tasks that are the ranks of one MPI job: MPI carries their large arrays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.cluster.processes import mpirun
from tests.server.clusters import describe

PROGRAM = """
import numpy as np
import allreduce as ar

server = ar.Server()  # of ALLREDUCE_CLUSTER, by the rank
if server.name != "/job:worker/task:0":
    server.join("worker:0")
else:
    with ar.device("/job:ps/task:0"):
        v = ar.Variable(np.arange(400_000, dtype=np.float32), name="v")
    def step(scale):
        with ar.device("/job:worker/task:1"):
            large = v * scale
        with ar.device("/job:worker/task:0"):
            return ar.ops.sum(large - v), large[:3]
    with ar.Session(server.target, timeout=60) as session:
        for scale in (2.0, 3.0, 4.0):
            total, first = session.run(step, args=(np.float32(scale),))
            expected = np.sum(np.arange(400_000, dtype=np.float64)) * (scale - 1)
            assert abs(total / expected - 1) < 1e-4, (total, expected)
            assert np.asarray(first).tolist() == [0.0, scale, 2 * scale]
    print("all right", flush=True)
server.close()
"""


def _run(tmp_path: Path, ranks: int, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {
        **os.environ,
        "ALLREDUCE_CLUSTER": describe({"worker": 2, "ps": 1}).as_json(),
        "ALLREDUCE_TRANSPORT": "mpi",
        "ALLREDUCE_LOG_LEVEL": "INFO",
    }
    command = mpirun(ranks, script)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_ranks_are_the_tasks_of_a_cluster_in_their_order(tmp_path: Path) -> None:
    result = _run(tmp_path, 3)
    assert result.returncode == 0, result.stderr
    assert "all right" in result.stdout
    assert "MPI carries large arrays to /job:worker/task:1" in result.stderr


def test_a_rank_too_few_is_an_error_that_says_so(tmp_path: Path) -> None:
    result = _run(tmp_path, 2)
    assert result.returncode != 0
    assert "ALLREDUCE_CLUSTER has 3 tasks; start as many ranks" in result.stderr
