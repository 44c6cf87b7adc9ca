"""What `reduce` and `gather` promise: exact sums, means that match, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import ShapeError, UsageError
from tests.harness import run_ranks, script_of


@pytest.fixture
def strategy() -> Iterator[ar.MirroredStrategy]:
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    yield strategy
    strategy.close()


def _thrice(value: Any) -> ar.PerReplica:
    return ar.PerReplica((value,) * 3)


@pytest.mark.parametrize(
    ("part", "total", "dtype"),
    [
        (np.array([200, 100], np.uint8), 900, np.uint64),
        (np.array([2**31 - 1], np.int32), 3 * (2**31 - 1), np.int64),
        (np.array([-(2**31)], np.int32), -3 * 2**31, np.int64),
        (np.array([2**62 + 1], np.uint64), 3 * (2**62 + 1), np.uint64),
        (np.array([True, True]), 6, np.int64),
        (np.array([0.5, 1.0], np.float16), 4.5, np.float16),
    ],
)
def test_sums_of_integers_are_wide(
    strategy: ar.MirroredStrategy, part: np.ndarray, total: float, dtype: Any
) -> None:
    result = strategy.reduce("sum", _thrice(part), axis=0)
    assert result.dtype == dtype
    assert result == total


def test_means_of_integers_are_floats(strategy: ar.MirroredStrategy) -> None:
    large = _thrice(np.array([2**63 + 5], np.uint64))
    assert strategy.reduce("mean", large, axis=0) == float(2**63 + 5)
    assert strategy.reduce("mean", _thrice(np.array([200, 101], np.uint8)), axis=0) == 150.5


def test_parts_have_to_fit(strategy: ar.MirroredStrategy) -> None:
    (batch,) = strategy.distribute_dataset([np.array([1.0, 2.0, 3.0, 4.0])])  # rows 2, 1, 1
    with pytest.raises(ShapeError, match=r"shapes \(2,\), \(1,\), \(1,\).*axis=0"):
        strategy.reduce("mean", batch)
    assert strategy.reduce("mean", batch, axis=0) == 2.5
    crossed = ar.PerReplica((np.ones((2, 1)), np.ones((1, 2)), np.ones((2, 1))))
    for op in ("sum", "mean"):
        with pytest.raises(ShapeError, match="more than axis 0"):
            strategy.reduce(op, crossed, axis=0)
        with pytest.raises(ShapeError, match="no axis 2"):
            strategy.reduce(op, crossed, axis=2)
        with pytest.raises(ShapeError, match="no axis 0"):
            strategy.reduce(op, 3.0, axis=0)
        for axis in ("x", (0,), 0.5, True):
            with pytest.raises(UsageError, match="axis is an integer, not"):
                strategy.reduce(op, crossed, axis=axis)  # type: ignore[arg-type]
    np.testing.assert_array_equal(strategy.reduce("mean", np.ones((2, 3)), axis=-1), np.ones(2))
    with pytest.raises(UsageError, match="not complex128"):
        strategy.reduce("sum", 1j)
    many = ar.PerReplica((np.ones(2),) * 4)
    with pytest.raises(UsageError, match="each replica of this process, 3, but this one 4"):
        strategy.reduce("sum", [many])
    with pytest.raises(UsageError, match="each replica of this process, 3, but this one 4"):
        strategy.gather(many)


def test_gather_keeps_every_bit(strategy: ar.MirroredStrategy) -> None:
    fine = np.array([1.5, 2.5], np.longdouble) + np.finfo(np.longdouble).eps
    gathered = strategy.gather(_thrice(fine))
    assert gathered.dtype == fine.dtype
    np.testing.assert_array_equal(gathered, np.tile(fine, 3))
    with pytest.raises(ShapeError, match="no axis 5"):
        strategy.gather(_thrice(np.ones((2, 2))), axis=5)
    for axis in ("x", None, 0.5):
        with pytest.raises(UsageError, match="axis is an integer, not"):
            strategy.gather(_thrice(fine), axis=axis)  # type: ignore[arg-type]


def combine() -> None:
    import json

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank = strategy.communicator.rank
    small = ar.PerReplica((np.array([200, 100], np.uint8),))
    large = ar.PerReplica((np.array([2**62 + 1], np.uint64),))
    fine = np.full((2, rank), 0.5, np.longdouble) + np.finfo(np.longdouble).eps
    gathered = strategy.gather(fine, axis=1)
    nothing = strategy.gather(np.ones((0, 2), np.float16))
    results: list[Any] = [
        int(strategy.reduce("sum", small, axis=0)),
        int(strategy.reduce("sum", large, axis=0)),
        float(strategy.reduce("mean", small, axis=0)),
        bool((gathered == fine[0, 0] if rank else gathered != 0.5).all()),
        gathered.shape,
        (nothing.shape, nothing.dtype.name),
    ]
    print(json.dumps(results))


def disagree() -> None:
    import json

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank, refused = strategy.communicator.rank, []
    table, loss, count = np.arange(4.0).reshape(2, 2), np.float32(0.5), 128
    for value, axis in ((loss, None), (count, None), (table, 0), (table, 1)):
        strategy.reduce("mean", value, axis)  # what was agreed on once says nothing of a later call
    for attempt in (
        lambda: ar.MultiWorkerMirroredStrategy(devices_per_replica=1 + rank % 2),
        lambda: strategy.reduce("sum" if rank else "add", np.ones(2)),
        lambda: strategy.reduce("sum", np.ones(2 + rank % 2)),
        lambda: strategy.gather(np.ones(2, "f4" if rank else "f8")),
        lambda: strategy.reduce("mean", count if rank == 1 else loss),
        lambda: strategy.reduce("mean", table, axis=int(rank == 1)),
        lambda: strategy.reduce("mean", table, axis=5 if rank == 1 else 0),
        lambda: strategy.reduce("sum", {"a": 1.0} if rank == 1 else [1.0]),
        lambda: strategy.gather(table, axis=int(rank == 1)),
    ):
        try:
            attempt()
        except ar.AllreduceError as error:
            refused.append(f"{type(error).__name__}: {error}")
    print(json.dumps(refused))


@pytest.fixture(scope="module")
def told() -> list[tuple[Any, Any]]:
    """What each of three ranks printed in `combine` and in `disagree`."""
    results = run_ranks("\n".join(map(script_of, (combine, disagree))), 3)
    assert not any(result.returncode for result in results), results
    first, second = zip(*(result.stdout.splitlines() for result in results), strict=True)
    return list(zip(map(json.loads, first), map(json.loads, second), strict=True))


def test_ranks_combine_as_replicas_do(told: list[tuple[Any, Any]]) -> None:
    for values, _ in told:
        assert values == [900, 3 * (2**62 + 1), 150.0, True, [2, 3], [[0, 2], "float16"]]


def test_ranks_that_differ_are_told_how_in_every_call(told: list[tuple[Any, Any]]) -> None:
    for rank, (_, refused) in enumerate(told):
        made, asked, shaped, gathered, typed, axes, absent, nested, along = refused
        where = f"MismatchError: MultiWorkerMirroredStrategy on rank {rank}: "
        others = f"{where}rank 1 raised UsageError: 1 devices"
        own = "UsageError: MultiWorkerMirroredStrategy on rank 1: 1 devices ("
        assert made.startswith(own if rank == 1 else others)
        lead = f"MismatchError: reduce on rank {rank}: "
        others = f"{lead}rank 0 raised UsageError: unknown reduction 'add'"
        own = "UsageError: reduce on rank 0: unknown reduction 'add'"
        assert asked.startswith(others if rank else own)
        assert gathered.startswith(f"MismatchError: gather on rank {rank}: the dtype or shape of a")
        assert along.startswith(
            f"MismatchError: gather on rank {rank}: axis is 0 on ranks 0, 2 but 1"
        )
        assert shaped.startswith(f"{lead}the value is float64 (2,) on ranks 0, 2 but float64 (3,) ")
        assert typed.startswith(f"{lead}the value is float32 () on ranks 0, 2 but int64 () on rank")
        assert axes.startswith(f"{lead}axis is 0 on ranks 0, 2 but 1 on rank 1;")
        own = "the replicas' parts have shapes (2, 2); there is no axis 5 in all"
        assert nested.startswith(f"{lead}the value is [0] float64 ()")
        assert absent == (
            f"ShapeError: reduce on rank 1: {own}"
            if rank == 1
            else f"{lead}rank 1 raised ShapeError: {own}"
        )
