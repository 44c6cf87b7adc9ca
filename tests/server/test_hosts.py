"""A cluster on several hosts, each a network namespace of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allreduce.cluster.spec import ClusterSpec
from tests import netns
from tests.server.clusters import task_command

PORT = 2222
SECRET = {"ALLREDUCE_SECRET": "known to these tasks"}
CLIENT = """
import sys
import numpy as np
import allreduce as ar

target, workers = sys.argv[1], int(sys.argv[2])
with ar.device("/job:ps/task:0"):
    v = ar.Variable(np.arange(6, dtype=np.float32).reshape(2, 3), name="v")
optimizer = ar.optim.SGD(0.5)

def step(x):
    losses = []
    for i in range(workers):
        with ar.device(f"/job:worker/task:{i}"):
            losses.append(ar.ops.sum(ar.ops.square(x @ v) * (i + 1.0), axis=1))
    loss = ar.ops.concatenate(losses, axis=0)
    optimizer.minimize(loss, [v])
    return loss

x = np.ones((4, 2), np.float32)
with ar.Session(target, timeout=30) as session:
    for i in range(3):
        loss = session.run(step, args=(x,))
    print("sum", float(np.sum(session.read(v))), "loss", float(np.mean(loss)), flush=True)
    if len(sys.argv) > 3:
        input()
        try:
            session.run(step, args=(x,))
        except ar.errors.PeerLostError as error:
            print("lost", error)
"""


@contextlib.contextmanager
def _tasks(made: list[netns.Host]) -> Iterator[ClusterSpec]:
    """Serve `ps` on the first host, and a worker on each of the others."""
    addresses = [f"{each.address}:{PORT}" for each in made]
    spec = ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})
    started = []
    try:
        host_of = dict(zip(addresses, made, strict=True))
        for job, task, address in spec:
            host = host_of[address]
            command = host.command(*task_command(job, task), "--cluster", spec.as_json())
            started.append(subprocess.Popen(command, env={**os.environ, **SECRET}))
        yield spec
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait(25)


def _client(host: netns.Host, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        host.command(sys.executable, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **SECRET},
    )


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.torture), 4])
def test_a_graph_on_several_hosts_gives_one_results(count: int, tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(CLIENT)
    with netns.hosts(count) as made, _tasks(made) as spec:
        client = _client(
            made[-1], str(program), f"grpc://{spec.address('worker', 0)}", str(count - 1)
        )
        out, err = client.communicate(timeout=90)
    assert client.returncode == 0, err
    assert out == _expected(count - 1)


@pytest.mark.torture
def test_a_host_that_vanishes_is_named(tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(CLIENT)
    with netns.hosts(3) as made, _tasks(made) as spec:
        target = f"grpc://{spec.address('worker', 0)}"
        client = _client(made[1], str(program), target, "2", "again")
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == _expected(2)
            down = ["ip", "-n", made[2].name, "link", "set", "eth0", "down"]
            subprocess.run(down, check=True, timeout=20)
            out, err = client.communicate("\n", timeout=60)
        finally:
            client.kill()
            client.wait(25)
    assert out.startswith("lost"), err
    assert "/job:worker/task:1" in out


def _expected(workers: int) -> str:
    """Compute what the client prints: descent on the mean of all workers' losses."""
    import numpy as np

    x = np.ones((4, 2), np.float32)
    v = np.arange(6, dtype=np.float32).reshape(2, 3)
    factors = np.repeat(np.arange(1, workers + 1), 4)
    for _ in range(3):
        product = x @ v
        loss = np.concatenate([np.sum(product**2, 1)] * workers) * factors
        gradient = sum(2 * x.T @ product * (i + 1) for i in range(workers)) / (4 * workers)
        v = v - np.float32(0.5) * gradient
    return f"sum {float(np.sum(v))} loss {float(np.mean(loss))}\n"
