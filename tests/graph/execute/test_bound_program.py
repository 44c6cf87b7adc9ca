"""A program stays bound to memory for several batch sizes: how many depends on their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import lookup
from allreduce.errors import OutOfMemoryError
from allreduce.graph.execute import executor
from allreduce.graph.execute.bound_program import BoundProgram
from tests.harness import collector_off

COLUMNS = 500
WEIGHTS = np.ones((COLUMNS, COLUMNS), np.float32)


@ar.function
def doubled(x: Any) -> Any:
    return ar.ops.sum(ar.ops.matmul(x * 2.0, WEIGHTS))


@ar.function
def halved(x: Any) -> Any:
    return ar.ops.sum(ar.ops.matmul(x / 2.0, WEIGHTS))


@pytest.fixture(params=[1, 2])
def strategy(request: pytest.FixtureRequest) -> Iterator[ar.MirroredStrategy]:
    strategy = ar.MirroredStrategy([f"CPU:{index}" for index in range(request.param)])
    yield strategy
    strategy.close()


@pytest.fixture
def alone() -> Iterator[ar.MirroredStrategy]:
    """A strategy of one replica, on a device that nothing else has used, without the collector."""
    strategy = ar.MirroredStrategy(["CPU:3"])
    with collector_off():
        yield strategy
    lookup("CPU:3").memory.limit = None
    strategy.close()


def _run(strategy: ar.MirroredStrategy, step: Any, rows: int) -> None:
    """Run a step with these numbers of rows per replica, and check its results."""
    replicas = strategy.num_replicas_in_sync
    x = np.ones((rows * replicas, COLUMNS), np.float32)
    (batch,) = strategy.distribute_dataset([x])
    factor = 2.0 if step is doubled else 0.5
    for value in strategy.local_results(strategy.run(step, args=(batch,))):
        assert float(value) == rows * COLUMNS * COLUMNS * factor


def _frames(strategy: ar.MirroredStrategy, step: Any) -> list[list[BoundProgram]]:
    compiled = strategy.latest(step)
    assert compiled is not None
    return [each.bound_programs for each in compiled.executors]


def _rows(strategy: ar.MirroredStrategy, step: Any) -> list[int]:
    return [bound.frame.info.rows for bound in _frames(strategy, step)[0]]


def test_six_batch_sizes_are_bound_once_each(strategy: ar.MirroredStrategy) -> None:
    sizes = range(1, 7)
    for rows in sizes:
        _run(strategy, doubled, rows)
    first = _frames(strategy, doubled)
    for _ in range(3):
        for rows in sizes:
            _run(strategy, doubled, rows)
    assert [len(each) for each in first] == [6] * strategy.num_replicas_in_sync
    for before, now in zip(first, _frames(strategy, doubled), strict=True):
        assert all(one is other for one, other in zip(before, now, strict=True))


def _measure(strategy: ar.MirroredStrategy, rows: int) -> int:
    """Return the bytes of a frame, which the device counts."""
    memory = lookup("CPU:3").memory
    before = memory.used
    _run(strategy, doubled, rows)
    (frames,) = _frames(strategy, doubled)
    assert rows * COLUMNS * 4 <= memory.used - before <= frames[-1].nbytes
    return frames[-1].nbytes


def test_the_least_recently_used_go_and_so_does_their_memory(
    alone: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes, memory = _measure(alone, 100), lookup("CPU:3").memory
    monkeypatch.setattr(executor, "KEPT_BYTES", 4 * nbytes)
    memory.peak = memory.used  # other tests of this process had theirs
    for rows in (99, 98, 97, 100, 96):
        _run(alone, doubled, rows)
    assert _rows(alone, doubled) == [98, 97, 100, 96]
    for rows in (98, 95):
        _run(alone, doubled, rows)
    assert _rows(alone, doubled) == [100, 96, 98, 95]
    assert memory.used < 4 * nbytes
    for rows in range(60, 90):
        _run(alone, doubled, rows)
    assert memory.used < 5 * nbytes  # of the next one before an old one goes
    assert memory.peak < 6 * nbytes


def test_the_two_batch_sizes_used_last_stay_however_large(
    alone: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "KEPT_BYTES", 0)
    for rows in (10, 11, 12):
        _run(alone, doubled, rows)
    (before,) = _frames(alone, doubled)
    for rows in (11, 12) * 3:
        _run(alone, doubled, rows)
    (now,) = _frames(alone, doubled)
    assert [bound.frame.info.rows for bound in now] == [11, 12]
    assert all(one is other for one, other in zip(before, now, strict=True))


def test_where_memory_is_short_other_batch_sizes_and_programs_give_theirs(
    alone: ar.MirroredStrategy,
) -> None:
    nbytes, memory = _measure(alone, 100), lookup("CPU:3").memory
    memory.limit = memory.used + 2 * nbytes
    for step in (doubled, halved):
        for rows in (100, 99, 98, 97, 96, 100):
            _run(alone, step, rows)
    with pytest.raises(OutOfMemoryError, match=r"do not fit on .*CPU:3"):
        _run(alone, doubled, 1000)
    _run(alone, halved, 100)


def test_a_scan_counts_for_what_it_repeats(alone: ar.MirroredStrategy) -> None:
    @ar.function
    def summed(x: Any) -> Any:
        def step(carry: Any, _: Any) -> tuple[Any, Any]:
            return carry * 2.0, carry

        return ar.ops.sum(ar.scan(step, x, np.zeros((50,), np.float32))[1])

    memory = lookup("CPU:3").memory
    before = memory.used
    alone.run(summed, args=(np.ones((100, COLUMNS), np.float32),))
    (frames,) = _frames(alone, summed)
    assert frames[-1].nbytes > 50 * 100 * COLUMNS * 4
    assert frames[-1].nbytes > memory.used - before
