"""Clusters whose tasks and clients end, stop or fail: nothing hangs, and nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import PeerLostError
from allreduce.graph.core import op_table
from tests.server.clusters import serving

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
        assert gate.entered.wait(20)
        with session._channels["/job:worker/task:0"]._reading:  # a client that answers nothing
            closing = pool.submit(worker.close)
            threading.Timer(0.3, gate.opened.set).start()  # then it connects to `ps`
            closing.result(15)
        with pytest.raises(PeerLostError, match="/job:worker/task:0"):
            running.result(15)
