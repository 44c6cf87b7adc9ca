"""A worker of parameter servers in this process, for several files of tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import allreduce as ar
from tests.server.clusters import describe
from tests.strategies.parameter_server.small_models import Worker


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Return a function that makes a strategy, with so many servers in this process."""
    with contextlib.ExitStack() as stack:

        def make(servers: int = 1, workers: int = 1, **options: Any) -> ar.ParameterServerStrategy:
            spec = describe({"ps": servers, "worker": workers})
            for number in range(servers):
                stack.enter_context(ar.Server(spec, "ps", number))
            monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
            monkeypatch.setenv("ALLREDUCE_TASK", "worker:0")
            strategy = ar.ParameterServerStrategy(timeout=20, **options)
            stack.callback(strategy.close)
            return strategy

        yield make
