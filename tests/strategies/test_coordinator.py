"""A coordinator's functions run on workers, and again elsewhere when one dies."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import coordinator as module

import allreduce as ar
from allreduce.cluster.host import waiting
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    JoinError,
    PeerLostError,
    TimeoutError,
    UsageError,
)
from tests.server.clusters import describe, start_task


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Start a server and two workers as processes; this process is the chief."""
    spec = describe({"chief": 1, "ps": 1, "worker": 2})
    monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
    monkeypatch.setenv("ALLREDUCE_TASK", "chief:0")
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    started = {f"{job}:{n}": start_task(spec, job, n) for job, n in tasks}
    try:
        yield started
    finally:
        for each in started.values():
            each.kill()
            each.communicate()


def test_another_strategy_has_no_coordinator() -> None:
    untyped: Any = ar
    with pytest.raises(UsageError, match=r"takes an ar\.ParameterServerStrategy.*, not Mirrored"):
        untyped.ClusterCoordinator(ar.MirroredStrategy())


def test_functions_run_on_workers_that_live(cluster: dict[str, Any]) -> None:
    strategy = ar.ParameterServerStrategy(timeout=60)
    with ar.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            weights = ar.Variable(np.zeros(3, np.float32), name="weights")
        assert weights.place.job == "ps"
        optimizer = ar.optim.SGD(0.1)
        x = np.eye(3, dtype=np.float32)

        @ar.function
        def step(x: Any, y: Any) -> Any:
            loss = ar.ops.square(ar.ops.matmul(x, ar.ops.reshape(weights, (3, 1))) - y)
            optimizer.minimize(ar.ops.reshape(loss, (-1,)), [weights])
            return ar.ops.sum(loss)

        def run(count: int) -> list[float]:
            y = np.asarray([[1.0], [2.0], [3.0]], np.float32)
            futures = [coordinator.schedule(step, (x, y)) for _ in range(count)]
            coordinator.join()
            assert all(each.done() for each in futures)
            return [float(each) for each in coordinator.fetch(futures)]

        before = run(10)
        os.kill(cluster["worker:1"].pid, signal.SIGKILL)
        began = time.monotonic()
        after = run(60)
        assert time.monotonic() - began < 50  # not the timeout
        assert after[-1] < before[0] / 10

        def wrong(x: Any) -> Any:
            return ar.ops.embedding(x, np.asarray([7]))

        failed = coordinator.schedule(wrong, (x,))
        with contextlib.suppress(UsageError):  # of the first function, where it has come already
            later = coordinator.schedule(step, (x, np.zeros((3, 1), np.float32)))
        with pytest.raises(UsageError, match="7"):
            failed.fetch()
        with contextlib.suppress(UsageError):
            coordinator.join()
        del later
    with pytest.raises(ClosedError):
        coordinator.schedule(step, (x, x))


def test_a_function_whose_worker_restarts_runs_again(cluster: dict[str, Any]) -> None:
    """The worker answers again, as another process that does not know the function."""
    strategy = ar.ParameterServerStrategy(timeout=60)
    x = np.ones(3, np.float32)
    spec = strategy.cluster
    with ar.ClusterCoordinator(strategy) as coordinator:
        coordinator.fetch([coordinator.schedule(ar.ops.sum, (x,)) for _ in range(8)])
        workers = [name for name in cluster if name.startswith("worker")]
        for name in workers:
            os.kill(cluster[name].pid, signal.SIGSTOP)
        futures = [coordinator.schedule(ar.ops.sum, (x,)) for _ in workers]
        time.sleep(0.5)  # both are on their way
        for name in workers:
            cluster[name].kill()
            cluster[name].communicate()
            cluster[name] = start_task(spec, "worker", int(name[-1]))
        assert [float(each) for each in coordinator.fetch(futures)] == [3.0, 3.0]
    strategy.close()


def test_a_cluster_without_other_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = describe({"ps": 1, "worker": 1})
    monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:0")
    with ar.Server(spec, "ps", 0):
        strategy = ar.ParameterServerStrategy(timeout=20)
        with pytest.raises(UsageError, match="chief=1,ps=1,worker=2"):
            ar.ClusterCoordinator(strategy)
        strategy.close()


class _Worker:
    """A session whose worker is lost while it runs a function."""

    generation = 0

    def __init__(self) -> None:
        self.runs, self.is_lost = threading.Event(), threading.Event()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, *_: Any) -> Any:
        self.runs.set()
        assert self.is_lost.wait(20)
        return self.tasks()

    def tasks(self) -> Any:
        raise PeerLostError("the worker is lost")


@pytest.fixture
def chief(monkeypatch: pytest.MonkeyPatch) -> Iterator[ar.ParameterServerStrategy]:
    """Return the strategy of a chief whose one worker is not up."""
    spec = describe({"chief": 1, "ps": 1, "worker": 1})
    monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
    monkeypatch.setenv("ALLREDUCE_TASK", "chief:0")
    with ar.Server(spec, "ps", 0):
        strategy = ar.ParameterServerStrategy(timeout=20)
        yield strategy
        strategy.close()


def fetched(future: Any) -> Any:
    """Return a function's result or error, which has to come soon."""
    deadline = time.monotonic() + 20
    while not future.done():
        assert time.monotonic() < deadline, "fetch would wait for ever"
        time.sleep(0.01)
    return future.fetch()


def test_a_function_whose_worker_is_lost_after_close_ends(
    chief: ar.ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _Worker()
    monkeypatch.setattr(module, "Session", lambda *_, **__: worker)
    with ar.ClusterCoordinator(chief) as coordinator:
        future = coordinator.schedule(lambda: 1)
        assert worker.runs.wait(20)
    worker.is_lost.set()
    with pytest.raises(ClosedError):
        fetched(future)


@pytest.mark.parametrize("wait", ["join", "fetch"])
def test_workers_that_never_come_are_named_and_not_waited_for_without_end(
    chief: ar.ParameterServerStrategy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait: str,
) -> None:
    monkeypatch.setattr(waiting, "WARN_SECONDS", 0.1)
    chief.timeout = 2.0
    with ar.ClusterCoordinator(chief) as coordinator:
        future = coordinator.schedule(lambda: 1)
        with pytest.raises(TimeoutError, match=r"no worker has come within 2 s: start worker:0"):
            future.fetch() if wait == "fetch" else coordinator.join()
        with pytest.raises(TimeoutError):
            fetched(future)
    said = [each for each in caplog.messages if each.startswith("waiting for worker:0 (for")]
    assert len(said) > 1  # again and again


def test_no_function_waits_for_workers_that_refuse(
    chief: ar.ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise JoinError("different secrets")

    monkeypatch.setattr(module, "Session", refuse)
    with ar.ClusterCoordinator(chief) as coordinator:
        for _ in range(3):
            with pytest.raises(AllreduceError, match="different secrets"):
                fetched(coordinator.schedule(lambda: 1))


def test_a_closed_coordinator_waits_for_no_worker_and_logs_nothing(
    chief: ar.ParameterServerStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    chief.timeout = 90.0  # longer than the join below
    coordinator = ar.ClusterCoordinator(chief)
    coordinator.close()
    coordinator.close()
    for thread in coordinator._threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
