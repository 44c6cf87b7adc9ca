"""Tasks and clients that do not fit together: each error names the task and what to do."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import allreduce as ar
from allreduce.cluster.spec import ClusterSpec
from allreduce.errors import JoinError, UsageError
from allreduce.graph.core import op_table
from allreduce.server.task.worker import Worker
from tests.server.clusters import describe, processes, serving

X = np.ones((4, 2), np.float32)


def _on_ps(x: ar.Tensor) -> Any:
    with ar.device("/job:ps/task:0"):
        return x + 1.0


def test_two_clusters_that_differ_are_named() -> None:
    spec = describe({"worker": 1, "ps": 2})
    swapped = spec.as_dict()
    swapped["ps"] = {0: spec.address("ps", 1), 1: spec.address("ps", 0)}
    with (
        ar.Server(ClusterSpec(swapped), "worker", 0) as server,
        ar.Server(spec, "ps", 0),
        ar.Server(spec, "ps", 1),
        ar.Session(server.target, timeout=10) as session,
        pytest.raises(JoinError, match=r"is /job:ps/task:1, but .*has /job:ps/task:0 there; give"),
    ):
        session.run(_on_ps, (X,))


def test_a_task_with_another_secret_is_named() -> None:
    spec = describe({"worker": 1, "ps": 1})
    with (
        ar.Server(spec, "worker", 0, secret="one") as server,
        ar.Server(spec, "ps", 0, secret="two"),
        ar.Session(server.target, secret="one", timeout=10) as session,
        pytest.raises(JoinError, match=r"and /job:ps/task:0 at .* different secrets; .*SECRET"),
    ):
        session.run(_on_ps, (X,))


def test_a_server_that_is_no_task_is_named_at_once() -> None:
    with ThreadPoolExecutor(1) as pool:
        other = grpc.server(pool)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        with pytest.raises(JoinError, match=rf"server at 127\.0\.0\.1:{port} is no task"):
            ar.Session(f"grpc://127.0.0.1:{port}", timeout=60)
        other.stop(None)


def test_addresses_and_numbers_that_no_task_can_have_are_named() -> None:
    for secret in ("", "known"):
        with pytest.raises(JoinError, match=r"host 'no-such\.invalid' .*does not resolve"):
            ar.Server({"ps": ["no-such.invalid:2222"]}, "ps", 0, secret=secret)
    with pytest.raises(UsageError, match="task_index is an integer, not '0'"):
        ar.Server({"ps": ["127.0.0.1:2222"]}, "ps", "0")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="secret=<hidden> is not valid: expected any non-empty"):
        ar.Server({"ps": ["127.0.0.1:2222"]}, "ps", 0, secret=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="secret=<hidden> is not valid: expected any non-empty"):
        ar.Session("grpc://127.0.0.1:2222", secret=5)  # type: ignore[arg-type]


def test_arguments_of_another_kind_are_named() -> None:
    with ar.device("/job:worker/task:0/cpu:0"):
        w = ar.Variable(np.ones(2, np.float32), name="w")
    with serving(worker=1) as (server,), ar.Session(server.target, timeout=60) as session:
        with pytest.raises(UsageError, match=r"session\.run takes a function, not int 3"):
            session.run(3)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"_on_ps\(\) missing 1 required .* 'x'"):
            session.run(_on_ps)
        with pytest.raises(UsageError, match="cannot make a tensor of str 'a'; it takes numbers"):
            session.assign(w, "a")
        session.assign(w, [3, 4])
        np.testing.assert_array_equal(session.read(w), [3, 4])
        with pytest.raises(UsageError, match="3 names no task; expected a name such as"):
            server.join(3)  # type: ignore[arg-type]


def test_an_operator_that_the_task_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))

    def cpu(out: np.ndarray, inputs: Any, _: Any) -> None:
        out[...] = inputs[0]

    operator = ar.register_op("only_at_the_client", shape=lambda specs, _: specs[0], cpu=cpu)
    spec = describe({"worker": 1})
    target = f"grpc://{spec.address('worker', 0)}"
    with processes(spec), ar.Session(target, timeout=60) as session:
        with pytest.raises(UsageError, match="operator 'only_at_the_client'"):
            session.run(lambda x: operator(x), (X,))
        np.testing.assert_array_equal(session.run(lambda x: x + 1.0, (X,)), X + 1)


def test_an_error_of_registering_a_part_brings_the_traceback_of_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def register(self: Worker, request: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(Worker, "register", register)
    with serving(worker=1) as (server,), ar.Session(server.target, timeout=30) as session:
        with pytest.raises(KeyError, match="/job:worker/task:0: a bug") as caught:
            session.run(lambda x: x + 1.0, (X,))
        (note,) = caught.value.__notes__
        assert f'{__file__}", line {register.__code__.co_firstlineno + 1}, in register' in note


class _OwnError(Exception):
    pass


@pytest.mark.parametrize(
    ("raised", "type_here", "text"),
    [
        (UsageError("wrong"), UsageError, rf"{re.escape(__file__)}:\d+: .*wrong$"),
        (ValueError("wrong"), ValueError, "wrong$"),
        (KeyError("wrong"), KeyError, "'wrong'$"),
        (FileNotFoundError(2, "none", "x.npy"), FileNotFoundError, r"\[Errno 2\] none: 'x.npy'$"),
        (UnicodeEncodeError("ascii", "ä", 0, 1, "no"), RuntimeError, "UnicodeEncodeError: 'ascii"),
        (_OwnError("wrong"), RuntimeError, "_OwnError: wrong$"),
    ],
)
def test_an_error_in_a_users_kernel_keeps_its_type_and_names_its_line_in_the_task(
    raised: Exception, type_here: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))

    def cpu(out: np.ndarray, inputs: Any, _: Any) -> None:
        raise raised

    operator = ar.register_op("wrong_in_a_task", shape=lambda specs, _: specs[0], cpu=cpu)
    with serving(worker=1) as (server,), ar.Session(server.target, timeout=30) as session:
        with pytest.raises(type_here) as caught:
            session.run(lambda x: operator(x), (X,))
        assert type(caught.value) is type_here
        assert re.match(text, str(caught.value)), caught.value
        (note,) = caught.value.__notes__
        assert f'{__file__}", line {cpu.__code__.co_firstlineno + 1}, in cpu' in note


def _halves(name: str) -> dict[str, float]:
    return {"learning_rate_factor": 0.5}


def test_optimizers_with_code_of_ones_own_are_refused() -> None:
    class Own(ar.optim.SGD):
        pass

    class Schedule(ar.optim.schedules.ExponentialDecay):
        pass

    wrong = [Own(0.1), ar.optim.SGD(Schedule(0.1, 1, 0.5)), ar.optim.SGD(0.1, groups=_halves)]
    with serving(worker=1) as (server,), ar.Session(server.target, timeout=10) as session:
        with ar.device("/job:worker/task:0"):
            v = ar.Variable(np.zeros(2, np.float32), name="v")
        for optimizer in wrong:
            with pytest.raises(UsageError, match=r"cannot be sent to another task: .*of your own"):
                session.run(lambda o=optimizer: o.minimize(ar.ops.sum(v), [v]))
