"""Tasks that die or stop at random moments, and strangers at a task's ports."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import allreduce as ar
from allreduce.cluster.spec import ClusterSpec
from allreduce.errors import PeerLostError
from tests.server.clusters import describe, processes, serving, start_task

ROUNDS = 100
X = np.ones((4, 2), np.float32)

Step = Callable[[ar.Tensor], ar.Tensor]


def _job(name: str) -> tuple[ar.Variable, Step]:
    """Return a variable on `ps`, and a step over three tasks that changes it."""
    with ar.device("/job:ps/task:0"):
        v = ar.Variable(np.zeros(2, np.float32), name=name)

    def step(x: ar.Tensor) -> ar.Tensor:
        with ar.device("/job:worker/task:0"):
            first = ar.ops.sum(x, axis=0)
        with ar.device("/job:worker/task:1"):
            second = first * 2.0
        with ar.device("/job:ps/task:0"):
            v.assign(v + second)
            return v + 0.0

    return v, step


@pytest.fixture
def cluster() -> Iterator[tuple[ClusterSpec, dict[str, subprocess.Popen[str]]]]:
    spec = describe({"ps": 1, "worker": 2})
    with processes(spec) as started:
        yield spec, started


@pytest.mark.torture
@pytest.mark.timeout(2400)
def test_random_kills_and_stops_of_each_role(
    cluster: tuple[ClusterSpec, dict[str, subprocess.Popen[str]]],
) -> None:
    spec, started = cluster
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    choose = random.Random(seed)
    v, step = _job("v")
    for turn in range(ROUNDS):
        with ar.Session(f"grpc://{spec.address('worker', 0)}", timeout=30) as session:
            session.assign(v, np.zeros(2, np.float32))
            session.run(step, args=(X,))
            victim = choose.choice(list(started))
            stop = choose.random() < 0.4
            timer = threading.Timer(choose.uniform(0, 0.3), _hit, (started[victim], stop))
            timer.start()
            try:
                _run_until(session, step, 1.5)
                error = None
            except PeerLostError as raised:
                error = raised
            finally:
                timer.join()
            job, _, task = victim.partition(":")
            if stop:
                assert error is None, f"round {turn}: a stop of 1 s ended a step: {error}"
                continue
            assert error is not None, f"round {turn}: nobody noticed that {victim} was killed"
            assert f"/job:{job}/task:{task}" in str(error), f"round {turn}: {victim}: {error}"
            started[victim].communicate(timeout=25)
            started[victim] = start_task(spec, job, int(task))
            session.assign(v, np.zeros(2, np.float32))
            np.testing.assert_array_equal(session.run(step, args=(X,)), [8, 8])


def _hit(task: subprocess.Popen[str], stop: bool) -> None:
    """Kill a task, or stop it for a second."""
    if not stop:
        task.kill()
        return
    task.send_signal(signal.SIGSTOP)
    time.sleep(1)
    task.send_signal(signal.SIGCONT)


def _run_until(session: ar.Session, step: Step, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        session.run(step, args=(X,))


def test_strangers_at_a_tasks_ports_change_nothing() -> None:
    choose = random.Random(7)
    with serving(worker=2, ps=1) as servers, ar.Session(servers[0].target, timeout=30) as session:
        _, step = _job("fuzzed")
        session.run(step, args=(X,))
        hosts = [server.target.removeprefix("grpc://").rpartition(":") for server in servers]
        ports = [int(port) for _, _, port in hosts]
        ports += [server.connections.data_port for server in servers]
        for turn in range(60):
            with socket.create_connection(("127.0.0.1", choose.choice(ports)), 5) as stranger:
                stranger.sendall(_bytes_of_a_stranger(choose, turn))
            np.testing.assert_array_equal(session.run(step, args=(X,)), [8 * (turn + 2)] * 2)
        assert all(session.tasks().values())


def _bytes_of_a_stranger(choose: random.Random, turn: int) -> bytes:
    noise = choose.randbytes(choose.randrange(1, 4000))
    beginnings = (
        b"",
        b"allreduce.data.1",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\xff\xff\xff\xff",
    )
    return beginnings[turn % len(beginnings)] + noise
