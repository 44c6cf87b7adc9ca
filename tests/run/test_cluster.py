"""Clusters under the launcher: tasks find each other, end together and can be restarted."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.processes import free_address, run, running
from tests.harness import ROOT
from tests.run.launches import LAUNCH

ENDED = "ended with exit code 0 before the tasks that it serves"
PROGRAM = """
import os, sys, time
import numpy as np
import allreduce as ar

server = ar.Server()
if server.task.task:
    server.join("worker:0")
    sys.exit()
with ar.device("/job:ps/task:0"):
    v = ar.Variable(np.zeros(2, np.float32), name="v")
def step():
    v.assign(v + 1.0)
    with ar.device("/job:worker/task:1"):
        return v * 10.0
with ar.Session(server.target, timeout=60) as session:
    print("value", np.asarray(session.run(step)).tolist())
"""


def test_all_tasks_of_a_cluster_are_started_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = run([*LAUNCH, "--cluster", "ps=1,worker=2", str(script)], deadline=90)
    assert result.code == 0, result.err
    assert "[worker:0] value [10.0, 10.0]" in result.out


def test_a_failing_worker_ends_the_cluster_and_is_named(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys; sys.exit(7)")
    began = time.monotonic()
    result = run([*LAUNCH, "--cluster", "ps=1,worker=1", str(script)], deadline=60)
    assert result.code == 7
    assert "worker:0 (process" in result.err
    assert "failed with exit code 7" in result.err
    assert time.monotonic() - began < 40


def test_the_error_of_a_failed_worker_ends_the_output(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "error = ValueError('no such row')\nerror.add_note('a note')\n"
        "try:\n    {}['missing']\nexcept KeyError:\n    raise error\n"
    )
    result = run([*LAUNCH, "--cluster", "ps=1,worker=1", str(script)], deadline=60)
    last = result.err.splitlines()[-1]
    assert last.startswith("[allreduce.run] "), result
    assert last.endswith("failed with exit code 1: ValueError: no such row"), result


def test_a_survivor_that_saves_has_time_to_do_so(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['ALLREDUCE_TASK'] == 'worker:1':\n    sys.exit(7)\n"
        "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.02)\nprint('saved')\n"
    )
    gate = tmp_path / "gate"
    command = [*LAUNCH, "--cluster", "ps=1,worker=2", str(script), str(gate)]
    with running(command) as process:
        process.error_line("waiting for worker:0, ps:0 to end, for up to 27 s more (--grace)")
        gate.touch()
        result = process.finish(25)
    assert (result.code, "[worker:0] saved" in result.out) == (7, True), result


def test_a_failed_task_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\nmark = sys.argv[1]\n"
        "if not os.path.exists(mark):\n    open(mark, 'w').close()\n    sys.exit(3)\n"
        "print('second try', os.environ['ALLREDUCE_TASK'])\n"
    )
    mark = str(tmp_path / "mark")
    command = [*LAUNCH, "--cluster", "worker=1", "--restarts", "1", str(script), mark]
    result = run(command, deadline=60)
    assert result.code == 0, result.err
    assert "[worker:0] second try worker:0" in result.out
    assert "failed with exit code 3; starting it again" in result.err


def test_a_cluster_in_a_job_of_the_launcher_is_a_job_of_its_own(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.py", tmp_path / "outer.py"
    inner.write_text("import allreduce as ar\nprint('joined', ar.init().size)\n")
    outer.write_text(
        "import subprocess, sys\n"
        f"command = {[*LAUNCH, '--cluster', 'worker=2', str(inner)]}\n"
        "sys.exit(subprocess.run(command, timeout=50).returncode)\n"
    )
    result = run([*LAUNCH, "-n", "1", str(outer)], deadline=60)
    assert result.code == 0, result.err
    assert result.out.count("joined 2") == 2


@pytest.mark.parametrize("named", ["ALLREDUCE_CLUSTER", "TF_CONFIG"])
def test_ranks_take_no_place_in_a_cluster_that_the_launcher_is_in(
    tmp_path: Path, named: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import allreduce as ar\ncomm = ar.init()\n"
        "try:\n    ar.Server()\n"
        "except ar.UsageError as error:\n    print(comm.rank, error)\n"
    )
    spec = {"worker": [free_address()]}
    outside = {"ALLREDUCE_CLUSTER": json.dumps(spec), "ALLREDUCE_TASK": "worker:0"}
    if named == "TF_CONFIG":
        task = {"type": "worker", "index": 0}
        outside = {"TF_CONFIG": json.dumps({"cluster": spec, "task": task})}
    result = run([*LAUNCH, "-n", "2", str(script)], outside, deadline=60)
    assert result.code == 0, result.err
    for rank in range(2):
        assert f"[{rank}] {rank} [server] no cluster is given" in result.out
    assert "ignored" not in result.err


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("")
    for options, said in (
        (["--cluster", "ps=1"], "no job runs the program"),
        (["--cluster", "ps:1"], "as in ps=1,worker=2"),
        (["-n", "2", "--cluster", "worker=1"], "either -n"),
        (["-n", "2", "--restarts", "1"], "either -n"),
        ([], "either -n"),
    ):
        result = run([*LAUNCH, *options, str(script)], deadline=30)
        assert result.code != 0
        assert said in " ".join(result.err.replace("│", "").split())


def test_the_example_trains(tmp_path: Path) -> None:
    example = ROOT / "mpi_examples" / "in_graph.py"
    result = run([*LAUNCH, "--cluster", "ps=1,worker=2", str(example)], deadline=110)
    assert result.code == 0, result.err
    assert "lost" not in result.err
    accuracy = float(result.out.rpartition("test accuracy ")[2].split()[0])
    assert accuracy > 0.94


RESTARTED_PS = """
import os, sys, time
import numpy as np
import allreduce as ar
from allreduce.errors import PeerLostError

server = ar.Server()
with ar.device("/job:ps/task:0"):
    v = ar.Variable(np.zeros(2, np.float32), name="v")

def step():
    v.assign(v + 1.0)
    return v * 10.0

with ar.Session(server.target, timeout=60) as session:
    session.run(step)
    for child in os.popen(f"ps -o pid= -o args= --ppid {os.getppid()}").read().splitlines():
        if "allreduce.server" in child:
            os.kill(int(child.split()[0]), int(sys.argv[1]))
    for _ in range(300):
        try:
            session.run(step)
        except PeerLostError as error:
            if "has restarted, and" in str(error):
                break
        time.sleep(0.2)
    session.assign(v, [5, 6])
    print("value", np.asarray(session.run(step)).tolist())
server.close()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda each: each.name)
def test_a_ps_that_ends_early_is_started_again(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "program.py"
    script.write_text(RESTARTED_PS)
    command = [*LAUNCH, "--cluster", "ps=1,worker=1", "--restarts", "1", str(script)]
    result = run([*command, str(int(number))], deadline=110)
    assert result.code == 0, result.err
    assert "[worker:0] value [60.0, 70.0]" in result.out
    ends = {
        signal.SIGKILL: "was killed by SIGKILL",
        signal.SIGTERM: ENDED,
    }
    assert f"{ends[number]}; starting it again" in result.err
    assert "/job:ps/task:0 is back after a restart" in result.err


# Worker 0 asks the server to end, and returns when the launcher has noticed the end.
ENDED_PS = """
import json, os, signal, socket, sys, time

if os.environ["ALLREDUCE_TASK"] == "worker:1":
    sys.exit(7)
address, port = json.loads(os.environ["ALLREDUCE_CLUSTER"])["ps"]["0"].split(":")
while socket.socket().connect_ex((address, int(port))) or not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
children = os.popen(f"ps -o pid= -o args= --ppid {os.getppid()}").read().splitlines()
(server,) = [int(each.split()[0]) for each in children if "allreduce.server" in each]
os.kill(server, signal.SIGTERM)
while os.path.exists(f"/proc/{server}"):
    time.sleep(0.05)
"""


def test_a_ps_that_ends_before_the_program_ends_the_cluster_and_is_named(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ENDED_PS)
    command = [*LAUNCH, "--cluster", "ps=1,worker=1", str(script), str(tmp_path)]
    result = run(command, deadline=90)
    assert result.code == 1, result
    assert f"{ENDED}; ending the other 1" in result.err
    assert result.err.splitlines()[-1] == f"[allreduce.run] the job ended because ps:0 {ENDED}"


def test_a_ps_is_named_though_a_worker_that_has_lost_it_ended_first(tmp_path: Path) -> None:
    script, gate = tmp_path / "program.py", tmp_path / "gate"
    script.write_text(ENDED_PS)
    command = [*LAUNCH, "--cluster", "ps=1,worker=2", "--grace", "90", str(script), str(gate)]
    with running(command) as process:
        process.error_line("failed with exit code 7; ending the other 2")
        gate.touch()
        result = process.finish(90)
    assert result.code == 1, result
    assert result.err.splitlines()[-1] == f"[allreduce.run] the job ended because ps:0 {ENDED}"
