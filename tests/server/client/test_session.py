"""Functions on the tasks of a cluster: the values of one process, and clear errors."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import (
    ClosedError,
    DeviceError,
    JoinError,
    PeerLostError,
    ShapeError,
    TimeoutError,
    UsageError,
)
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.connect import PROTOCOL, prove_call
from tests.server.clusters import describe, processes, serving, start_task, task_command

X = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
PS, FIRST, SECOND = "/job:ps/task:0/cpu:0", "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"
HERE = "CPU:0"  # of all three, in one process


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[ar.Server]]:
    with serving(worker=2, ps=1) as servers:
        yield servers


@pytest.fixture
def session(cluster: list[ar.Server]) -> Iterator[ar.Session]:
    with ar.Session(cluster[0].target, timeout=30) as made:
        yield made


def _training(place: tuple[str, str, str], name: str) -> tuple[Any, list[ar.Variable]]:
    """Return a step with random draws and Adam, and its variables, each layer on another device."""
    ps, first, second = place
    ar.set_seed(5)
    with ar.device(ps):
        kernel = ar.Variable(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), name=name)
        bias = ar.Variable(np.zeros(4, np.float32), name=f"{name}/bias")
    with ar.device(second):
        head = ar.Variable(np.ones((4, 2), np.float32), name=f"{name}/head")
    variables = [kernel, bias, head]
    optimizer = ar.optim.Adam(0.05)

    def step(x: ar.Tensor) -> Any:
        with ar.device(first):
            hidden = ar.ops.tanh(ar.ops.matmul(x, kernel) + bias)
            hidden = ar.ops.dropout(hidden, 0.3)
        with ar.device(second):
            loss = ar.ops.sum(ar.ops.square(ar.ops.matmul(hidden, head)), axis=1)
        optimizer.minimize(loss, variables)
        return loss, {"mean": ar.ops.mean(loss), "name": "loss"}

    return step, variables


def test_a_step_over_three_tasks_gives_the_bits_of_one_process(session: ar.Session) -> None:
    step, variables = _training((PS, FIRST, SECOND), "bits")
    found = [session.run(step, args=(X + i,)) for i in range(4)]
    after = [session.read(each) for each in variables]
    step, variables = _training((HERE,) * 3, "bits")
    alone = ar.function(step)
    for i, (loss, rest) in enumerate(found):
        expected, others = alone(X + i)
        np.testing.assert_array_equal(loss, expected)
        assert rest["name"] == others["name"] == "loss"
        assert float(rest["mean"]) == float(others["mean"])
    for value, variable in zip(after, variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


def test_operators_without_a_device_run_on_the_master(session: ar.Session) -> None:
    assert float(session.run(lambda a: ar.ops.sum(a) + 1.0, args=(X,))) == pytest.approx(
        float(X.sum()) + 1, rel=1e-6
    )


def test_a_value_that_exists_wins_over_an_initial_one(cluster: list[ar.Server]) -> None:
    def variable(value: float) -> ar.Variable:
        with ar.device(PS):
            return ar.Variable(np.full(3, value, np.float32), name="kept")

    def read(v: ar.Variable) -> Any:
        return v * 1.0

    with ar.Session(cluster[0].target) as first:
        mine = variable(1)
        np.testing.assert_array_equal(first.run(lambda: read(mine)), np.ones(3))
        first.assign(mine, [7, 8, 9])
    with ar.Session(cluster[1].target) as second:  # another client, through another master
        theirs = variable(2)
        np.testing.assert_array_equal(second.run(lambda: read(theirs)), [7, 8, 9])
        with ar.device(PS):
            other = ar.Variable(np.zeros(4, np.float32), name="kept")
        with pytest.raises(UsageError, match=r"'kept' is float32\(3,\) on .*describes it as"):
            second.run(lambda: other * 1.0)


def test_clients_that_are_not_chief_wait_for_it(cluster: list[ar.Server]) -> None:
    with ar.device(PS):
        late = ar.Variable(np.ones(2, np.float32), name="late")
    with (
        ar.Session(cluster[0].target, is_chief=False, timeout=1) as other,
        pytest.raises(TimeoutError, match=r"the chief has not initialised \['late'\] on /job:ps"),
    ):
        other.run(lambda: late + 1.0)
    with ar.Session(cluster[0].target) as chief:
        chief.run(lambda: late + 1.0)
    with ar.Session(cluster[0].target, is_chief=False, timeout=5) as other:
        np.testing.assert_array_equal(other.run(lambda: late + 1.0), [2, 2])


def test_a_changed_learning_rate_takes_effect_and_slots_stay(session: ar.Session) -> None:
    with ar.device(PS):
        v = ar.Variable(np.zeros((), np.float32), name="slow")
    optimizer = ar.optim.SGD(1.0, momentum=0.5)

    def step() -> Any:
        optimizer.minimize(v * 1.0, [v])
        return v * 1.0

    assert float(session.run(step)) == -1.0
    optimizer.learning_rate = 0.25
    assert float(session.run(step)) == -1.75  # half of the momentum, and a quarter


def test_two_optimizers_of_one_variable_take_turns(session: ar.Session) -> None:
    def steps(place: str) -> tuple[ar.Variable, list[Any]]:
        with ar.device(place):
            v = ar.Variable(np.array([1.0, -2.0], np.float32), name="two")

        def by(optimizer: Any) -> Any:
            def step() -> Any:
                optimizer.minimize(ar.ops.sum(v * v), [v])
                return v * 1.0

            return step

        return v, [by(ar.optim.SGD(0.1)), by(ar.optim.Adam(0.5))]

    remote, both = steps(PS)
    _, alone = steps(HERE)
    alone = [ar.function(each) for each in alone]
    for turn in range(7):
        which = turn % 2
        expected = np.asarray(alone[which]())
        np.testing.assert_array_equal(session.run(both[which]), expected)
        np.testing.assert_array_equal(session.read(remote), expected)


@pytest.mark.parametrize("second", [ar.optim.SGD, ar.optim.Lion])
def test_no_update_of_several_clients_is_lost(cluster: list[ar.Server], second: Any) -> None:
    name = f"common/{second.__name__}"

    def client(server: ar.Server, optimizer: Any) -> None:
        with ar.device(PS):
            v = ar.Variable(np.zeros(3, np.float32), name=name)

        def step() -> None:
            optimizer.minimize(ar.ops.sum(v * 1.0), [v])

        with ar.Session(server.target, timeout=30) as session:
            for _ in range(100):
                session.run(step)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(client, cluster[:2], [ar.optim.SGD(1.0), second(1.0)]))
    with ar.device(PS):
        v = ar.Variable(np.zeros(3, np.float32), name=name)
    with ar.Session(cluster[0].target) as session:
        np.testing.assert_array_equal(session.read(v), [-200] * 3)


def test_what_a_variable_of_another_task_refuses_outside_a_session() -> None:
    with ar.device(PS):
        v = ar.Variable(np.zeros(2, np.float32), name="far")
    for use in (v.numpy, lambda: np.asarray(v), lambda: v + 1, lambda: v.assign([1, 2])):
        with pytest.raises(UsageError, match=r"'far' is held by /job:ps/task:0.*session\."):
            use()
    with pytest.raises(DeviceError, match=r"/job:ps/task:0.*pass the function to Session\.run"):
        ar.function(lambda: v * 1.0)()


def test_the_local_task_has_a_name() -> None:
    with ar.device("/job:localhost/replica:0/task:0/cpu:0"):
        v = ar.Variable(np.ones(2, np.float32))
    np.testing.assert_array_equal(v.numpy(), [1, 1])


def test_wrong_use_is_named(session: ar.Session) -> None:
    local = ar.Variable(np.ones(2, np.float32), name="mine")
    with pytest.raises(UsageError, match=r"'mine' belongs to this process"):
        session.run(lambda: local * 1.0)
    with pytest.raises(DeviceError, match=r"/job:ps/task:7.*there are .*, /job:ps/task:0$"):
        session.run(lambda a: _on("/job:ps/task:7/cpu:0", a), args=(X,))
    with pytest.raises(DeviceError, match=r"/job:wroker/task:0.*; did you mean 'worker'\?$"):
        session.run(lambda a: _on("/job:wroker/task:0/cpu:0", a), args=(X,))
    with pytest.raises(DeviceError, match=r"CPU:9, which that task does not have; .*CPU:0"):
        session.run(lambda a: _on("/job:ps/task:0/cpu:9", a), args=(X,))
    wrong: Any
    for wrong in ("127.0.0.1:1", "grpc://host", "grpc://:1", "grpc://127.0.0.1:70000", None):
        with pytest.raises(UsageError, match="grpc://host:port"):
            ar.Session(wrong)
    wrong = X
    with pytest.raises(UsageError, match=r"args=\(x,\), not as ndarray"):
        session.run(lambda a: a * 1.0, wrong)
    wrong = "mine"
    with pytest.raises(UsageError, match=r"expected an ar.Variable, not str 'mine'"):
        session.read(wrong)
    with ar.device(PS):
        v = ar.Variable(np.ones(2, np.float32), name="shaped")
    with pytest.raises(UsageError, match=r"shape \(2,\); a value of shape \(3,\)"):
        session.assign(v, [1, 2, 3])
    with pytest.raises(UsageError, match=r"no value of variables \['shaped'\]"):
        session.read(v)
    session.close()
    with pytest.raises(ClosedError):
        session.run(lambda a: a * 1.0, args=(X,))


def _on(device: str, a: ar.Tensor) -> ar.Tensor:
    with ar.device(device):
        return a * 2.0


def test_an_operators_error_ends_the_step_on_all_tasks_and_names_the_line(
    session: ar.Session,
) -> None:
    def step(labels: ar.Tensor, x: ar.Tensor) -> Any:
        with ar.device(PS):
            loss = ar.ops.sparse_softmax_cross_entropy(labels, x)
        with ar.device(FIRST):
            return ar.ops.sum(loss)

    began = time.monotonic()
    with pytest.raises(UsageError, match=r"test_session\.py:\d+") as caught:
        session.run(step, args=(np.full(6, 9), X))
    assert time.monotonic() - began < 10
    assert any("/job:ps" in note for note in caught.value.__notes__)
    good = session.run(step, args=(np.zeros(6, np.int64), X))  # nothing of it is left
    assert np.isfinite(float(good))


def test_shapes_that_do_not_fit_are_found_before_anything_is_sent(session: ar.Session) -> None:
    with pytest.raises(ShapeError):
        session.run(lambda a: ar.ops.matmul(a, a), args=(X,))


def test_strangers_and_wrong_secrets_are_refused(cluster: list[ar.Server]) -> None:
    with pytest.raises(JoinError, match="have different secrets"):
        ar.Session(cluster[0].target, secret="wrong", timeout=5)
    with pytest.raises(TimeoutError, match=r"no task answers at 127\.0\.0\.1:1 within"):
        ar.Session("grpc://127.0.0.1:1", timeout=0.3)
    with pytest.raises(UsageError, match="not a loopback address"):
        ar.Server({"worker": ["192.0.2.1:0"]}, "worker", 0)


def test_a_session_survives_the_restart_of_its_master() -> None:
    spec = describe({"worker": 1, "ps": 1})
    with ar.Server(spec, "ps", 0):
        master = ar.Server(spec, "worker", 0)
        try:
            with ar.Session(master.target, timeout=20) as session:
                with ar.device(PS):
                    v = ar.Variable(np.zeros(2, np.float32), name="v")

                def by(factor: float) -> Any:
                    def step(x: ar.Tensor) -> Any:
                        with ar.device(PS):
                            return v + x * factor

                    return step

                first = by(2.0)
                np.testing.assert_array_equal(session.run(first, args=(X[0, :2],)), X[0, :2] * 2)
                for factor in (3.0, 4.0):
                    before = master.generation
                    master.close()
                    master = ar.Server(spec, "worker", 0)
                    assert master.generation != before
                    found = session.run(by(factor), args=(X[0, :2],))
                    np.testing.assert_array_equal(found, X[0, :2] * np.float32(factor))
                # Its handles are not those of the master before, whose parts `ps` still has.
                np.testing.assert_array_equal(session.run(first, args=(X[0, :2],)), X[0, :2] * 2)
        finally:
            master.close()


def test_a_proof_is_for_one_method_and_request_and_forgotten_handshakes_are_repeated() -> None:
    with serving(worker=1) as (server,), ar.Session(server.target, timeout=20) as session:
        peer = session._master
        request = pb.RegisterPartRequest(handle="one")
        proof = prove_call(b"", peer._nonces, "RegisterPart", request)
        request.caller.nonces, request.caller.proof = peer._nonces, proof
        other = pb.RegisterPartRequest(handle="two", caller=request.caller)
        assert not server.service.knows("RegisterPart", other)
        wrong = pb.RegisterGraphRequest(caller=request.caller)
        assert not server.service.knows("RegisterGraph", wrong)
        assert server.service.knows("RegisterPart", request)
        for _ in range(10_001):  # strangers
            server.service.greet(pb.HelloRequest(protocol=PROTOCOL, nonce=b"0" * 32))
        assert float(session.run(lambda a: ar.ops.sum(a) * 0.0, args=(X,))) == 0


def test_a_lost_task_is_named_and_its_variables_can_be_restored() -> None:
    spec = describe({"worker": 1, "ps": 1})
    with processes(spec) as tasks, ar.Session(f"grpc://{spec.address('worker', 0)}") as session:
        with ar.device(PS):
            v = ar.Variable(np.arange(3, dtype=np.float32), name="v")

        def step() -> Any:
            v.assign(v + 1.0)
            with ar.device(FIRST):
                return v * 2.0

        np.testing.assert_array_equal(session.run(step), [2, 4, 6])
        tasks["ps:0"].kill()
        with pytest.raises((PeerLostError, TimeoutError), match=r"/job:ps/task:0"):
            session.run(step)
        assert session.tasks()["/job:ps/task:0"] is False
        tasks["ps:0"].communicate(timeout=25)
        tasks["ps:0"] = start_task(spec, "ps", 0)
        with pytest.raises(PeerLostError, match=r"has restarted, and the values of .*'v'"):
            _until_it_serves(lambda: session.run(step))
        session.assign(v, [10, 20, 30])
        np.testing.assert_array_equal(session.run(step), [22, 42, 62])


def _until_it_serves(run: Any) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            run()
        except (PeerLostError, TimeoutError) as error:
            if "has restarted, and" in str(error):
                raise
            time.sleep(0.1)


_TERMINATED = """
import signal
from allreduce.server import __main__ as command

def serve(*_):  # as a server that answers, before its constructor has returned
    signal.raise_signal(signal.SIGTERM)

command.Server = serve
command.app()
"""


def test_sigterm_ends_a_task_from_its_first_answer_on() -> None:
    done = subprocess.run([sys.executable, "-c", _TERMINATED], timeout=50, check=False)
    assert done.returncode == 0


def test_a_task_by_itself_ends_at_sigterm_and_says_what_is_wrong() -> None:
    spec = describe({"worker": 1})
    with processes(spec) as tasks:
        with ar.Session(f"grpc://{spec.address('worker', 0)}", timeout=60) as session:
            assert session.tasks() == {"/job:worker/task:0": True}
        tasks["second"] = start_task(spec, "worker", 0)
        _, said = tasks["second"].communicate(timeout=60)
        assert tasks["second"].returncode == 1
        assert "cannot listen at" in said.splitlines()[-1]
        assert "the address is in use" in said.splitlines()[-1]
        assert "Failed to add port" not in said  # gRPC's own line
        tasks["worker:0"].terminate()
        tasks["worker:0"].communicate(timeout=25)
        assert tasks["worker:0"].returncode == 0
    for wrong, expected in (
        ('{"worker": 3}', "expected a list of host:port"),
        ("missing.json", "cannot be read"),
        ("{", "is not JSON"),
    ):
        done = subprocess.run(
            [*task_command("worker", 0), "--cluster", wrong],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert expected in done.stderr.splitlines()[-1]
