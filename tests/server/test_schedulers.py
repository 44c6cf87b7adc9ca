"""The files for Slurm and Kubernetes in `mpi_examples/clusters`, with what those set."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness import ROOT
from tests.server.clusters import as_tf_config, describe

CLUSTERS = ROOT / "mpi_examples" / "clusters"
PROGRAM = """
import numpy as np
import allreduce as ar

server = ar.Server()
if server.task.task:
    server.join("worker:0")
else:
    with ar.device("/job:ps/task:0"):
        v = ar.Variable(np.ones(2, np.float32), name="v")
    def step():
        with ar.device("/job:worker/task:1"):
            return v * 3.0
    with ar.Session(server.target, timeout=60) as session:
        print("value", np.asarray(session.run(step)).tolist())
    server.close()
"""
# Slurm's commands, for three hosts on the loopback interface.
SCONTROL = "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n127.0.0.3\\n'\n"
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
for task in 0 1 2; do SLURM_PROCID=$task "$@" & done
code=0
for task in 1 2 3; do wait -n || code=1; done
exit $code
"""


def test_the_slurm_script_starts_a_cluster(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "h[0-2]",
        "ALLREDUCE_PORT": str(describe({"ps": 1}).address("ps", 0).rpartition(":")[2]),
    }
    result = subprocess.run(
        ["bash", str(CLUSTERS / "cluster.sbatch"), str(program)],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "value [3.0, 3.0]" in result.stdout


def test_the_kubernetes_manifest_starts_a_cluster(tmp_path: Path) -> None:
    manifest = (CLUSTERS / "tfjob.yaml").read_text()
    commands = [json.loads(each) for each in re.findall(r"command: (\[.*\])", manifest)]
    replicas = [int(each) for each in re.findall(r"replicas: (\d+)", manifest)]
    assert [each[0] for each in commands] == ["python", "python"]
    assert (ROOT / commands[1][1]).is_file()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    spec = describe({"ps": replicas[0], "worker": replicas[1]})
    started = {}
    for job, task, _ in spec:
        words = commands[0][1:] if job == "ps" else [str(program)]
        environment = {**os.environ, "TF_CONFIG": as_tf_config(spec, job, task)}
        started[job, task] = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "ALLREDUCE_SECRET": "of the job"},
        )
    try:
        out, err = started["worker", 0].communicate(timeout=90)
        assert started["worker", 0].returncode == 0, err
        assert "value [3.0, 3.0]" in out
        assert started["worker", 1].wait(30) == 0
    finally:
        for each in started.values():  # the operator ends the servers, too
            each.kill()
            each.communicate(timeout=25)
