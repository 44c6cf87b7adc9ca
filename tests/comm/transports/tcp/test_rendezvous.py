"""A rank that dies while others are still being connected over tcp: those name it, and no other."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks


def _dies_half_connected(folder: str) -> None:
    """Rank 1 connects to rank 2 and dies before it calls rank 0, which gives up before 2 begins."""
    import os
    import signal
    import time
    from pathlib import Path
    from typing import Any

    import numpy as np
    import pytest

    from allreduce import errors
    from allreduce.comm import init
    from allreduce.comm.transports.tcp import connections, mesh, opener, rendezvous

    comm = init(transport="tcp", timeout=20)
    comm.barrier()
    gave_up = Path(folder, "gave up")

    def die(calls: connections.Dialer, *_: Any) -> None:
        channels = range(calls._mesh.channels)
        while not all((1, 2, channel) in calls._mesh.sockets for channel in channels):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def connect_late(*arguments: Any) -> mesh.Mesh:
        found = rendezvous.connect(*arguments)
        while not gave_up.exists():
            time.sleep(0.01)
        return found

    patch = pytest.MonkeyPatch()
    if comm.rank == 1:
        patch.setattr(connections.Dialer, "_call", die)
    elif comm.rank == 2:
        patch.setattr(opener, "connect", connect_late)
    try:
        part = comm.split(0)
        assert part is not None
        part.all_reduce(np.ones(3))
    except errors.PeerLostError as error:
        Path(folder, f"{comm.rank}.said").write_text(str(error))
    gave_up.touch()
    os._exit(0)


def test_who_gives_up_for_a_death_is_not_taken_for_dead(tmp_path: Path) -> None:
    results = run_ranks(_dies_half_connected, 3, arguments=(str(tmp_path),))
    assert [result.returncode for result in results] == [0, -9, 0], results
    for rank in (0, 2):
        said = (tmp_path / f"{rank}.said").read_text()
        assert ": rank 1 (process" in said, said
        assert "rank 0 (process" not in said, said
