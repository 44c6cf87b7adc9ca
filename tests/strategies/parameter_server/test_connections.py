"""How a worker meets its servers and its chief; what happens when one is missing or restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import allreduce as ar
from allreduce.cluster.host import waiting
from allreduce.cluster.spec import ClusterSpec
from allreduce.errors import JoinError, TimeoutError, UsageError
from allreduce.server.client import parameter_client
from allreduce.server.client.parameter_client import connect_all
from allreduce.server.protocol import connect
from tests.server.clusters import describe, task_command
from tests.strategies.parameter_server.small_models import Worker, data, trained, with_averages


@pytest.mark.parametrize("staleness", [None, 1])
def test_a_server_that_restarts_in_an_epoch_gets_gradients_again(
    monkeypatch: pytest.MonkeyPatch, staleness: int | None
) -> None:
    spec = describe({"ps": 1, "worker": 1})
    monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:0")
    servers = [ar.Server(spec, "ps", 0)]

    class Restarts(ar.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and len(servers) == 1:
                servers[0].close()
                servers.append(ar.Server(spec, "ps", 0))

    strategy = ar.ParameterServerStrategy(timeout=20, staleness=staleness)
    _, history = trained(strategy, ar.optim.SGD(0.1), callbacks=[Restarts()], epochs=3)
    updates = strategy.status()["updates"]["/job:ps/task:0"]
    strategy.close()
    servers[1].close()
    assert history["loss"][-1] < history["loss"][0]
    assert updates >= 3 * 8 - 1  # a batch under way when the server died may be missing


def test_a_server_that_was_replaced_is_not_used_again() -> None:
    spec = describe({"ps": 1, "worker": 1})
    with ar.Server(spec, "ps", 0) as first:
        (client,) = connect_all(spec, "worker:0", b"", 20.0)
        earlier = first.service._generation
    with ar.Server(spec, "ps", 0):
        client.call("status", {})
    with ar.Server(spec, "ps", 0) as cut_off:
        cut_off.service._generation = earlier
        client._timeout = 0.5
        with pytest.raises(
            TimeoutError, match=r"start it again .* with checkpoint=, they go on from there"
        ):
            client.call("status", {})
    client.close()


def test_a_second_process_of_a_task_is_refused(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = worker()
    monkeypatch.setattr(parameter_client, "_DYING_SECONDS", 0.5)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with pytest.raises(UsageError, match=r"worker:0: process \d+ on .* is this task already; give"):
        connect_all(strategy.cluster, "worker:0", b"", 20.0)
    assert strategy.status()["workers"] == ["worker:0"]


def test_a_server_that_is_another_task_is_refused() -> None:
    spec = describe({"ps": 2, "worker": 1})
    addresses = [spec.address("ps", number) for number in (1, 0)]
    swapped = ClusterSpec({**spec.as_dict(), "ps": addresses})
    with (
        ar.Server(spec, "ps", 0),
        ar.Server(spec, "ps", 1),
        pytest.raises(JoinError, match="is /job:ps/task:1, but this cluster has /job:ps/task:0"),
    ):
        connect_all(swapped, "worker:0", b"", 20.0)


def test_a_server_is_not_lost_by_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = describe({"ps": 1, "worker": 1})

    class Interrupted:
        def __init__(self, frames: Any) -> None:
            self._frames = frames

        def read(self, flags: int) -> Any:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self._frames, name)

    with ar.Server(spec, "ps", 0):
        (client,) = connect_all(spec, "worker:0", b"", 20.0)
        channel = client._channel
        assert channel is not None
        with monkeypatch.context() as patch:
            patch.setattr(channel, "_frames", Interrupted(channel._frames))
            with pytest.raises(KeyboardInterrupt):
                client.call("status", {})
        assert "is lost" not in caplog.text
        assert client.call("status", {})[0]["workers"] == ["worker:0"]
        client.close()


def test_several_threads_may_call_a_server() -> None:
    spec = describe({"ps": 1, "worker": 1})
    with ar.Server(spec, "ps", 0):
        (client,) = connect_all(spec, "worker:0", b"", 20.0)
    done: list[int] = []

    def call() -> None:
        for _ in range(100):
            client.call("status", {})
        done.append(1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ar.Server(spec, "ps", 0) as server:  # to which one of the threads connects again
            threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
            for each in threads:
                each.start()
            for each in threads:
                each.join(25)
            assert len(done) == 4
            deadline = time.monotonic() + 20
            while not server.connections._inbound:  # it may answer before it is listed
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert len(server.connections._inbound) == 1
            client.close()
    finally:
        sys.setswitchinterval(before)


def test_a_server_that_waits_for_a_worker_ends_with_its_strategy_and_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = describe({"ps": 1, "worker": 2})
    monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:0")
    with subprocess.Popen([*task_command("ps", 0), "--until", "worker:0"]) as server:
        try:
            first = ar.ParameterServerStrategy(timeout=60)
            monkeypatch.setenv("ALLREDUCE_TASK", "worker:1")
            other = ar.ParameterServerStrategy(timeout=60)
            first.close()
            while "worker:0" in other.status()["workers"]:
                time.sleep(0.01)
            other.close()
            assert server.wait(60) == 0
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("kind", "awaited"),
    [
        (trained, "the chief to call fit"),
        (lambda strategy, _: with_averages(strategy).train_on_batch(*data()), "initialise"),
    ],
    ids=["fit", "variables"],
)
def test_a_worker_names_the_chief_while_it_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Callable[..., Any],
    awaited: str,
) -> None:
    spec = describe({"ps": 1, "worker": 2})
    monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:1")
    monkeypatch.setattr(waiting, "WARN_SECONDS", 0.5)
    with ar.Server(spec, "ps", 0):
        strategy = ar.ParameterServerStrategy(timeout=20)
        object.__setattr__(strategy._worker, "timeout", 1.5)  # for the chief, not for the server
        with pytest.raises(TimeoutError, match=r"the chief has not .* within 1.5 s"):
            kind(strategy, ar.optim.SGD(0.1))
        strategy.close()
    (said,) = [each for each in caplog.messages if each.startswith("waiting for")]
    assert awaited in said
    assert "0.5 s so far, of 1.5 s" in said


def test_a_server_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "WARN_SECONDS", 0.3)
    spec = describe({"ps": 2, "worker": 1})
    monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:0")
    greet, missing = connect.Peer.greet, spec.address("ps", 1)

    def greet_missing_briefly(self: connect.Peer, timeout: float) -> None:
        greet(self, 0.5 if self.address == missing else timeout)

    monkeypatch.setattr(connect.Peer, "greet", greet_missing_briefly)
    with ar.Server(spec, "ps", 0) as server:
        with pytest.raises(TimeoutError, match="/job:ps/task:1 does not answer"):
            ar.ParameterServerStrategy(timeout=20)
        assert f"waiting for /job:ps/task:1 at {missing} to answer" in caplog.text
        deadline = time.monotonic() + 20
        while server.connections.has_client():  # that of the strategy which was not made
            assert time.monotonic() < deadline
            time.sleep(0.01)
