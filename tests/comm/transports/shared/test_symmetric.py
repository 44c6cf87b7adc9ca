"""Symmetric memory that one rank does not live to map, or maps too late."""

from __future__ import annotations

from tests.harness import run_ranks


def _dies_while_rank_0_allocates() -> None:
    import os
    import time

    from allreduce import errors
    from allreduce.comm import init
    from allreduce.comm.transports.shared import memory, symmetric

    comm = init()
    if comm.rank == 1:
        symmetric.Symmetric._map = lambda *_: os._exit(9)  # type: ignore[method-assign]
    allocate = memory.allocate

    def slowly(nbytes: int) -> int:
        time.sleep(0.5)
        return allocate(nbytes)

    memory.allocate = slowly
    start = time.monotonic()
    try:
        comm.empty(1000)
    except errors.PeerLostError as error:
        print(time.monotonic() - start < 1.5, error, flush=True)
    time.sleep(max(0, start + 2 - time.monotonic()))  # no survivor's end informs the others
    os._exit(0)


def test_a_rank_that_dies_while_memory_is_made_is_named_by_all() -> None:
    results = run_ranks(_dies_while_rank_0_allocates, 3)
    for rank in (0, 2):
        assert results[rank].stdout.startswith("True"), results
        assert f"rank {rank}: rank 1 (process" in results[rank].stdout


def _slow_to_allocate() -> None:
    import time

    from allreduce import errors
    from allreduce.comm import init
    from allreduce.comm.transports.shared import memory

    comm = init(timeout=1)
    allocate, delays = memory.allocate, [1.3, 0.0]

    def slowly(nbytes: int) -> int:
        time.sleep(delays.pop(0))
        return allocate(nbytes)

    memory.allocate = slowly
    try:
        comm.empty(100_000, "float64")
    except errors.OutOfMemoryError as error:
        print(error)
    x = comm.empty(100_000, "float64")
    x[:] = comm.rank + 1
    comm.all_reduce(x, out=x)
    print(set(x))


def test_memory_that_came_too_late_is_not_taken_for_the_next() -> None:
    for result in run_ranks(_slow_to_allocate, 2):
        assert "rank 1 got 'Connection timed out'" in result.stdout, result
        assert result.stdout.endswith("{np.float64(3.0)}\n"), result
