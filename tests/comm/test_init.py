"""`init`: one communicator per process, the same again, anew after `close()`."""

from __future__ import annotations

from tests.harness import run_ranks


def _alone() -> None:
    import numpy as np
    import pytest

    from allreduce import comm, errors

    first = comm.init(timeout=40)
    assert comm.init() is first
    assert comm.init(rank=0, size=1, timeout=40, transport="shared") is first
    assert comm.world().size == 1
    for other in ({"timeout": 41}, {"rank": 1}, {"size": 2}, {"leader": "a:1"}, {"secret": "s"}):
        with pytest.raises(errors.UsageError, match="was called again with"):
            comm.init(**other)
    first.close()
    second = comm.init()
    assert second is not first
    assert second.all_reduce(np.ones(3)).tolist() == [1, 1, 1]
    second.close()
    print("fine")


def _anew() -> None:
    import numpy as np

    from allreduce import comm

    for generation in range(3):
        with comm.init() as member:
            assert member.all_reduce(np.ones(3) * generation)[0] == 2 * generation
            assert member.local_size == 2
            assert member.local_rank == member.rank
    replicas = comm.replica_communicators(comm.world(), 1 + comm.world().rank, name="replicas")
    assert [r.size for r in replicas] == [3] * len(replicas)
    assert [r.rank for r in replicas] == ([0] if comm.world().rank == 0 else [1, 2])
    print("fine")


def _unknown_transport() -> None:
    from allreduce import comm, errors

    try:
        comm.init()
    except errors.UsageError as error:
        print(error)


def test_alone() -> None:
    (result,) = run_ranks(_alone, 1, env={}, launcher="run")
    assert "fine" in result.stdout, result


def test_anew_after_close_and_beside_replicas() -> None:
    for result in run_ranks(_anew, 2):
        assert result.stdout == "fine\n", result


def test_an_unknown_transport_is_named_with_those_there_are() -> None:
    (result,) = run_ranks(
        _unknown_transport, 1, env={"ALLREDUCE_TRANSPORT": "sharde"}, launcher="run"
    )
    assert "unknown transport 'sharde': there are shared; did you mean 'shared'?" in result.stdout


def _mixed(replicas: tuple[int, ...]) -> None:
    import threading

    import numpy as np

    from allreduce import comm

    world = comm.world()
    members = comm.replica_communicators(world, replicas[world.rank], name="replicas")
    sums = [(0.0, 0)] * len(members)

    def run(index: int) -> None:
        member = members[index]
        x = member.empty(30000, "float32")
        for _ in range(5):
            x[:] = member.rank
            member.all_reduce(x, out=x)
            assert member.all_gather(member.rank).tolist() == list(range(member.size))
            y = member.all_reduce(np.full(70000, member.rank, "int64"))
        sums[index] = (float(x[-1]), int(y[-1]))
        member.close()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print([member.rank for member in members], sums)


def test_threads_of_several_processes_make_one_communicator() -> None:
    results = run_ranks(_mixed, 3, arguments=((2, 1, 3),))
    expected = str((15.0, 15))
    assert results[0].stdout == f"[0, 1] [{expected}, {expected}]\n", results
    assert results[1].stdout == f"[2] [{expected}]\n", results
    assert results[2].stdout.startswith("[3, 4, 5]"), results
