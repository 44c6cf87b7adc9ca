"""Clusters whose tasks and clients end, stop or fail: nothing hangs, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.cluster.host.address import split
from allreduce.cluster.spec import ClusterSpec
from allreduce.devices import DeviceName, logical_devices
from allreduce.errors import PeerLostError, TimeoutError, UnsupportedError, UsageError
from allreduce.graph.core import op_table
from allreduce.server.protocol.connect import Peer
from allreduce.server.task import worker
from allreduce.server.task.rendezvous import RemoteRendezvous
from tests.cluster.processes import wait_until
from tests.harness import ROOT, free_port
from tests.server.clusters import describe, serving

X = np.ones((4, 2), np.float32)
PS, FIRST, SECOND = "/job:ps/task:0/cpu:0", "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"


class Gate:
    """An operator that blocks until the test opens it."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.operator = ar.register_op("gate_of_a_test", shape=lambda s, _: s[0], cpu=self._pass)

    def _pass(self, out: np.ndarray, inputs: Any, _: Any) -> None:
        self.entered.set()
        assert self.opened.wait(30)
        out[...] = inputs[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[ar.Server]]:
    with serving(worker=2, ps=1) as servers:
        yield servers


@pytest.fixture
def session(cluster: list[ar.Server]) -> Iterator[ar.Session]:
    with ar.Session(cluster[0].target, timeout=30) as made:
        yield made


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))
    made = Gate()
    yield made
    made.opened.set()


def test_a_server_closes_while_a_step_runs(gate: Gate) -> None:
    def step(x: ar.Tensor) -> Any:
        with ar.device(FIRST):
            y = gate.operator(x)
        with ar.device(PS):
            return y * 2.0

    with (
        serving(worker=1, ps=1) as (worker, _),
        ThreadPoolExecutor(2) as pool,
        ar.Session(worker.target, timeout=20) as session,
    ):
        running = pool.submit(session.run, step, (X,))
        assert gate.entered.wait(25)
        with session._requests._channels[
            "/job:worker/task:0"
        ]._reading:  # a client that answers nothing
            closing = pool.submit(worker.close)
            threading.Timer(0.3, gate.opened.set).start()  # then it connects to `ps`
            closing.result(25)
        with pytest.raises(PeerLostError, match="/job:worker/task:0"):
            running.result(25)


def test_a_closed_server_leaves_no_threads_of_grpc() -> None:
    with serving(worker=1) as (server,), ar.Session(server.target, timeout=30) as session:
        session.run(lambda x: x + 1.0, (X,))
        threads = list(server._pool._threads)
        assert threads
    for each in threads:
        each.join(25)
        assert not each.is_alive()


@contextlib.contextmanager
def absent(spec: ClusterSpec) -> Iterator[Callable[[], None]]:
    """Listen at the address of `ps`; the function that it yields waits until a task connects."""
    with socket.create_server(split(spec.address("ps", 0))) as listener:
        listener.settimeout(60)

        def await_search() -> None:
            listener.accept()[0].close()
            listener.close()  # from now on connections are refused

        yield await_search


def test_ctrl_c_ends_a_process_whose_server_waits_for_a_task(tmp_path: Path) -> None:
    spec = describe({"worker": 1, "ps": 1})
    program = tmp_path / "program.py"
    program.write_text(
        "import signal\n"
        "import numpy as np\n"
        "import allreduce as ar\n"
        "from tests.server.test_failures import use_ps\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"server = ar.Server({spec.as_dict()!r}, 'worker', 0)\n"
        "ar.Session(server.target, timeout=300).run(use_ps, (np.ones(2, np.float32),))\n"
    )
    with absent(spec) as await_search:
        process = subprocess.Popen(
            [sys.executable, str(program)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            await_search()
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == -signal.SIGINT, error
    assert "program.py" in error
    assert "session.py" not in error
    assert "_channel.py" not in error  # gRPC's


def test_ctrl_c_while_a_task_is_missing_shows_no_error_of_grpc() -> None:
    class Interrupted(threading.Event):
        def wait(self, _: float | None = None) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        Peer(f"127.0.0.1:{free_port()}", b"", 60, closed=Interrupted())
    assert caught.value.__context__ is None


def use_ps(x: ar.Tensor) -> Any:
    with ar.device(PS):
        return x * 2.0


def test_steps_of_several_clients_overlap(gate: Gate) -> None:
    with (
        serving(worker=1, ps=1) as (worker, ps),
        ThreadPoolExecutor(1) as pool,
        ar.Session(worker.target, timeout=20) as first,
        ar.Session(ps.target, timeout=20) as second,
    ):
        with ar.device(PS):
            v = ar.Variable(np.zeros(2, np.float32), name="v")

        def step(x: ar.Tensor, through: Any) -> None:
            with ar.device(PS):
                v.assign(v + through(x))

        running = pool.submit(first.run, lambda x: step(x, gate.operator), (X[0],))
        assert gate.entered.wait(25)
        second.run(lambda x: step(x, lambda y: y), (X[0],))  # while the other step runs
        gate.opened.set()
        running.result(25)
        np.testing.assert_array_equal(second.read(v), [2, 2])


def test_a_graph_that_one_task_refuses_is_forgotten_by_the_others() -> None:
    with serving(worker=2, ps=1) as servers, ar.Session(servers[0].target, timeout=20) as session:
        with ar.device(PS):
            v = ar.Variable(np.zeros(2, np.float32), name="v")
            other = ar.Variable(np.zeros(3, np.float32), name="v")

        def use(x: ar.Tensor, variable: ar.Variable) -> Any:
            with ar.device(FIRST):
                y = x * 2.0
            with ar.device(SECOND):
                y = y * 2.0
            with ar.device(PS):
                return y[0] + variable[0]

        session.run(lambda x: use(x, v), (X,))
        before = [set(each.worker._parts) for each in servers]
        with pytest.raises(UsageError, match=r"/job:ps/task:0: variable 'v' is float32\(2,\)"):
            session.run(lambda x: use(x, other), (X,))
        wait_until(lambda: [set(each.worker._parts) for each in servers] == before)


def test_accumulated_gradients_are_refused(session: ar.Session) -> None:
    with ar.device(PS):
        v = ar.Variable(np.zeros(2, np.float32), name="accumulated")
    optimizer = ar.optim.SGD(0.1, gradient_accumulation=2)
    with pytest.raises(UnsupportedError, match=r"SGD\(gradient_accumulation=2\).*leave the option"):
        session.run(lambda: optimizer.minimize(ar.ops.sum(v), [v]))


def test_gpus_of_tasks_are_refused(
    session: ar.Session, cluster: list[ar.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Device:
        def __init__(self, name: str) -> None:
            self.name = DeviceName.parse(name)

    # A driver is not needed to be refused.
    found = [Device("GPU:0"), *logical_devices()]
    monkeypatch.setattr(worker, "logical_devices", lambda: found)
    assert cluster[0].worker.devices[0].kind == "CPU"
    np.testing.assert_array_equal(session.run(lambda x: x + 1.0, (X,)), X + 1)

    def step(x: ar.Tensor) -> Any:
        with ar.device("/job:ps/task:0/gpu:0"):
            return x + 1.0

    with pytest.raises(UnsupportedError, match=r"test_failures\.py:\d+: operator .*GPU:0.*cpu:0"):
        session.run(step, (X,))


def test_inputs_that_nothing_reads_are_not_sent(session: ar.Session) -> None:
    def step(x: ar.Tensor, unread: ar.Tensor) -> Any:
        return x + 1.0

    session.run(step, (X, np.zeros(5)))
    (program,) = session._functions[step].programs.values()
    assert [part.feeds for part in program.parts] == [(0,)]
    np.testing.assert_array_equal(session.run(lambda x, _: x, (X, X + 1)), X)
    assert session.run(lambda _: "nothing to compute", (X,)) == "nothing to compute"


def test_an_abort_after_a_steps_end_leaves_nothing() -> None:
    own = DeviceName.parse("/job:worker/replica:0/task:0")
    rendezvous = RemoteRendezvous("handle", own, lambda _: pytest.fail("nothing is sent"))
    rendezvous.abort(0, 1, ValueError("in time"))
    rendezvous.end(1)
    rendezvous.abort(0, 1, ValueError("late"))
    assert rendezvous._local._aborted == {}


def test_all_missing_tasks_are_named_at_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = describe({"worker": 1, "ps": 3})
    with (
        ar.Server(spec, "worker", 0) as server,
        ar.Server(spec, "ps", 1),
        ar.Session(server.target, timeout=4) as session,
    ):

        def step(x: ar.Tensor) -> Any:
            for i in range(3):
                with ar.device(f"/job:ps/task:{i}"):
                    x = x + 1.0
            return x

        with pytest.raises(TimeoutError, match=r"from /job:ps/task:0 at .*, /job:ps/task:2 at "):
            session.run(step, (X,))  # it waits for all at once, or it would name one
        with ar.Server(spec, "ps", 0), ar.Server(spec, "ps", 2):
            session.run(step, (X,))
        with ar.Server(spec, "ps", 0), ar.Server(spec, "ps", 2):
            caplog.set_level("INFO", "allreduce")
            _until_runs(session, step)
        said = [each.getMessage() for each in caplog.records]
        for who in ("[server] ", "[server] /job:worker/task:0: "):
            assert (
                len([each for each in said if each.startswith(f"{who}/job:ps/task:2 is back")]) == 1
            )


def _until_runs(session: ar.Session, step: Any) -> None:
    for _ in range(100):
        with contextlib.suppress(PeerLostError):
            session.run(step, (X,))
            return
        time.sleep(0.1)
    raise AssertionError("the session does not run again")


def test_a_process_ends_while_its_server_waits_for_a_missing_task() -> None:
    program = """
import threading, time
import numpy as np
import allreduce as ar
server = ar.Server({"worker": ["127.0.0.1:PORT"], "ps": ["127.0.0.1:1"]}, "worker", 0)
def run():
    session = ar.Session(server.target, timeout=120)
    def step(x):
        with ar.device("/job:ps/task:0"):
            return x + 1.0
    try:
        session.run(step, (np.ones(2),))
    except ar.errors.AllreduceError as error:
        print("the step has ended:", error)
threading.Thread(target=run, daemon=True).start()
time.sleep(1.5)
server.close()
""".replace("PORT", str(free_port()))
    done = subprocess.run([sys.executable, "-c", program], timeout=90, check=False)
    assert done.returncode == 0


def test_a_timeout_is_raised_when_it_is_over(gate: Gate) -> None:
    def step(x: ar.Tensor) -> Any:
        with ar.device(FIRST):
            y = gate.operator(x)
        with ar.device(PS):
            return y * 2.0

    with (
        serving(worker=1, ps=1) as (worker, _),
        ar.Session(worker.target, timeout=3) as session,
    ):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="has not answered within 3 s"):
            session.run(step, (X,))
        assert time.monotonic() - began < 20  # the gate is shut for 30
        gate.opened.set()


def test_an_error_is_raised_at_once_whichever_task_waits_for_it(session: ar.Session) -> None:
    def step(x: ar.Tensor, labels: ar.Tensor) -> Any:
        with ar.device(FIRST):
            y = x + 1.0
        with ar.device(PS):
            loss = ar.ops.sparse_softmax_cross_entropy(labels, y)
        with ar.device(FIRST):
            return ar.ops.sum(loss)

    began = time.monotonic()
    with pytest.raises(UsageError, match="label 9"):
        session.run(step, (X, np.full(4, 9)))
    assert time.monotonic() - began < 10  # not the timeout
    (program,) = session._functions[step].programs.values()
    assert [part.channel.peer for part in program.parts] == ["/job:worker/task:0", "/job:ps/task:0"]
    assert np.isfinite(float(session.run(step, (X, np.zeros(4, np.int64)))))


def test_join_learns_of_a_task_that_it_never_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TIMEOUT", "60")
    spec = describe({"worker": 3, "ps": 1})

    def step(x: ar.Tensor) -> Any:
        with ar.device(PS):
            return x + 1.0

    with ar.Server(spec, "ps", 0), ar.Server(spec, "worker", 1) as early:
        with ar.Server(spec, "worker", 0) as first, ar.Session(first.target) as session:
            session.run(step, (X,))
        began = time.monotonic()
        early.join("worker:0")
        assert time.monotonic() - began < 30
        with ar.Server(spec, "worker", 2) as late:  # as of another job on the same servers
            monkeypatch.setenv("ALLREDUCE_TIMEOUT", "1")
            with pytest.raises(TimeoutError, match="worker/task:0 has not come up within 1 s"):
                late.join("worker:0")


JOINING = """
import os, sys, time
import allreduce as ar
server = ar.Server()
if server.task.task:
    print("joining", flush=True)
    server.join("worker:0")
    print("joined", flush=True)
else:
    while not server.connections._inbound:  # the other one has not connected
        time.sleep(0.02)
    print("up", flush=True)
    input()
    if len(sys.argv) > 1:
        raise ValueError("of the script")
"""


def test_only_a_task_that_ends_in_good_order_ends_join(tmp_path: Path) -> None:
    script, spec = tmp_path / "joining.py", describe({"worker": 2})
    script.write_text(JOINING)

    def start(task: int, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "ALLREDUCE_CLUSTER": spec.as_json(),
                "ALLREDUCE_TASK": f"worker:{task}",
                "ALLREDUCE_TIMEOUT": "90",
            },
        )

    def say_up(task: subprocess.Popen[str]) -> None:
        assert task.stdout is not None
        assert task.stdout.readline() == "up\n"

    joining = start(1)
    started = [joining]
    try:
        for words in ((), ("fail",), ()):
            first = start(0, *words)
            started.append(first)
            say_up(first)
            if len(started) == 2:
                first.kill()
                first.wait(25)
            else:
                assert first.stdin is not None
                first.stdin.write("\n")
                first.stdin.flush()
                assert first.wait(25) == (1 if words else 0)
            if len(started) < 4:
                with pytest.raises(subprocess.TimeoutExpired):
                    joining.wait(1)
        out, _ = joining.communicate(timeout=25)
        assert out == "joining\njoined\n"
        assert joining.returncode == 0
    finally:
        for each in started:
            each.kill()
            each.communicate(timeout=25)


VANISHING = """
import sys
import numpy as np
import allreduce as ar

def step(x):
    with ar.device("/job:worker/task:0"):
        y = x + 1.0
    with ar.device("/job:ps/task:0"):
        return y * 2.0

with ar.Session(sys.argv[1], timeout=60) as session:
    session.run(step, (np.ones(2, np.float32),))
    (program,) = session._functions[step].programs.values()
    # Half of a step: `ps` waits for the other half.
    (pair,) = [each for each in program.parts if each.channel.peer == "/job:ps/task:0"]
    program.parts[:] = [pair]
    print("runs", flush=True)
    session.run(step, (np.ones(2, np.float32),))
"""


def test_a_client_that_vanishes_frees_its_steps_and_graphs() -> None:
    with serving(worker=1, ps=1) as (worker, ps):
        client = subprocess.Popen(
            [sys.executable, "-c", VANISHING, worker.target], stdout=subprocess.PIPE, text=True
        )
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "runs\n"
            wait_until(lambda: any(part.running for part in ps.worker._parts.values()))
            (part,) = ps.worker._parts.values()
        finally:
            client.kill()
            client.communicate(timeout=25)
        wait_until(lambda: not part.running and not ps.worker._parts and not worker.worker._parts)
