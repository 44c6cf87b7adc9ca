"""Symmetric memory that one rank does not live to map, or maps too late."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks


def _dies_while_rank_0_allocates(folder: str) -> None:
    import os
    import time
    from pathlib import Path

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
    try:
        comm.empty(1000)
    except errors.PeerLostError as error:
        Path(folder, str(comm.rank)).touch()
        until, other = time.monotonic() + 25, Path(folder, str(2 - comm.rank))
        while not other.exists() and time.monotonic() < until:  # no survivor's end informs it
            time.sleep(0.01)
        print(other.exists(), error, flush=True)
    os._exit(0)


def test_a_rank_that_dies_while_memory_is_made_is_named_by_all(tmp_path: Path) -> None:
    results = run_ranks(_dies_while_rank_0_allocates, 3, arguments=(str(tmp_path),))
    for rank in (0, 2):
        assert results[rank].stdout.startswith("True"), results
        assert f"rank {rank}: rank 1 (process" in results[rank].stdout


def _slow_to_allocate() -> None:
    import time
    from typing import Any

    from allreduce import errors
    from allreduce.comm import init
    from allreduce.comm.transports.shared import memory
    from allreduce.comm.transports.shared.links import Links

    comm = init()
    share, waits = Links.pass_file, [1.0, 20.0]

    def impatient(links: Links, fd: int | None, error: int, deadline: float) -> Any:
        return share(links, fd, error, time.monotonic() + waits.pop(0))

    allocate, delays = memory.allocate, [3.0, 0.0]

    def slowly(nbytes: int) -> int:
        time.sleep(delays.pop(0))
        return allocate(nbytes)

    if comm.rank == 0:
        memory.allocate = slowly
    else:
        Links.pass_file = impatient  # type: ignore[method-assign, assignment]
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
