"""Parameter servers on several hosts, each a network namespace of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from allreduce.cluster.spec import ClusterSpec
from tests import netns
from tests.harness import ROOT
from tests.server.clusters import task_command

PORT = 2222
EXAMPLE = ROOT / "mpi_examples" / "parameter_server.py"
ONE_CORE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # the hosts share this one's
# The chief trains until another worker has gone, or if asked, has come back after that.
UNTIL = """
import sys
import allreduce as ar
from tests.strategies.parameter_server.small_models import data, model_in

strategy = ar.ParameterServerStrategy(update=sys.argv[1])
model = model_in(strategy)
awaited = [["worker:0", "worker:1"], ["worker:0"], ["worker:0", "worker:1"]][: int(sys.argv[2])]


class Until(ar.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if strategy.is_chief and strategy.status()["workers"] == awaited[0]:
            print("workers", *awaited.pop(0), flush=True)
            self.model.stop_training = not awaited


losses = model.fit(
    *data(), batch_size=24, epochs=1_000_000, verbose=0, callbacks=[Until()]
).history["loss"]
print("trained", losses[-1] < losses[0], flush=True)
"""


@contextlib.contextmanager
def _job(
    made: Sequence[netns.Host], program: Path, *arguments: str, timeout: int = 60
) -> Iterator[list[subprocess.Popen[str]]]:
    """Serve `ps` on the first host, and run a program as a worker on each of the others."""
    addresses = [f"{each.address}:{PORT}" for each in made]
    spec = ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})
    common = {
        "ALLREDUCE_CLUSTER": spec.as_json(),
        "ALLREDUCE_SECRET": "known to these tasks",
        "ALLREDUCE_TIMEOUT": str(timeout),
        "PYTHONPATH": str(ROOT),
        **ONE_CORE,
    }
    server = made[0].command(*task_command("ps", 0))
    worker = [sys.executable, str(program), *arguments]
    commands = [server, *(host.command(*worker) for host in made[1:])]
    tasks = ["ps:0", *(f"worker:{i}" for i in range(len(made) - 1))]
    started: list[subprocess.Popen[str]] = []
    try:
        for task, command in zip(tasks, commands, strict=True):
            started.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **common, "ALLREDUCE_TASK": task},
                )
            )
        yield started
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.communicate(timeout=25)


@pytest.mark.parametrize(
    ("mode", "least"), [((), 0.95), pytest.param(("--sync",), 0.97, marks=pytest.mark.torture)]
)
def test_workers_on_two_hosts_train_on_the_server_of_a_third(
    mode: tuple[str, ...], least: float
) -> None:
    with netns.hosts(3) as made, _job(made, EXAMPLE, *mode) as (_, chief, other):
        out, err = chief.communicate(timeout=90)
        assert chief.returncode == 0, err
        _, err = other.communicate(timeout=30)
        assert other.returncode == 0, err
    (accuracy,) = re.findall(r"test accuracy (0\.\d+)", out)
    assert float(accuracy) >= least


def _set_link(host: netns.Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.name, "link", "set", "eth0", state], check=True, timeout=20)


def _read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    found = ""
    while found != line:
        if found.endswith("\n"):
            found = ""
        # By the byte: `communicate` would not return what a buffer has read ahead.
        one = os.read(process.stdout.fileno(), 1).decode()
        assert one, f"it has ended without {line!r}: {process.communicate()}"
        found += one


@pytest.mark.parametrize("update", ["async", pytest.param("sync", marks=pytest.mark.torture)])
def test_a_worker_whose_link_was_down_joins_again(update: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNTIL)
    with netns.hosts(3) as made, _job(made, program, update, "3") as (_, chief, other):
        _read_until(chief, "workers worker:0 worker:1\n")
        _set_link(made[2], "down")
        _read_until(chief, "workers worker:0\n")
        _set_link(made[2], "up")
        _read_until(chief, "workers worker:0 worker:1\n")
        for each in (chief, other):
            out, err = each.communicate(timeout=60)
            assert out == "trained True\n", err
    assert "/job:ps/task:0 is lost: " in err
    assert "/job:ps/task:0 is back, " in err


@pytest.mark.torture
def test_a_worker_whose_link_stays_down_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNTIL)
    with (
        netns.hosts(3) as made,
        _job(made, program, "async", "2", timeout=12) as (_, chief, other),
    ):
        _read_until(chief, "workers worker:0 worker:1\n")
        _set_link(made[2], "down")
        out, err = chief.communicate(timeout=60)
        assert out == "workers worker:0\ntrained True\n", err
        _, err = other.communicate(timeout=60)
    assert other.returncode == 1
    assert "was lost, and has not come back within 12 s: if it runs, check the network" in err
