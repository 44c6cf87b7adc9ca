"""`init`: one communicator per process, the same again, anew after `close()`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from allreduce import comm, errors
from allreduce.comm.registry import REGISTRY
from allreduce.comm.transports.handshake import Credentials
from tests.harness import ROOT, run_ranks


def _alone() -> None:
    import os

    import numpy as np
    import pytest

    from allreduce import comm, errors

    first = comm.init(timeout=40)
    assert comm.init() is first
    assert comm.init(rank=0, size=1, timeout=40.0, transport="shared") is first
    assert comm.world().size == 1
    for other in ({"timeout": 41}, {"rank": 1}, {"size": 2}, {"leader": "a:1"}, {"secret": "s"}):
        with pytest.raises(errors.UsageError, match="was called again with"):
            comm.init(**other)
    for name in ("rank", "size", "local_rank", "local_size", "transport"):
        with pytest.raises(AttributeError, match=f"rank 0: {name} cannot be set"):
            setattr(first, name, 3)
    first.close()
    second = comm.init(leader=os.environ.get("ALLREDUCE_LEADER"))
    assert comm.init(timeout=40) is second  # omitted arguments keep their values
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


def _as_before() -> None:
    import os

    from allreduce import comm

    names = {"rank": int, "size": int, "leader": str}
    named = {
        name: kind(os.environ.pop(f"ALLREDUCE_{name.upper()}")) for name, kind in names.items()
    }
    rank = named["rank"]
    comm.init(**named, timeout=20).close()
    comm.init().close()
    later: tuple[dict[str, Any], ...] = ({"timeout": 7}, {}, {"rank": rank}, {"size": 2})
    for arguments in (later[rank], later[2 + rank]):
        with comm.init(**arguments) as member:
            assert (member.rank, member.size) == (rank, 2), member
            member.barrier()
    assert comm.world().generation == 1
    print("fine")


def _after_a_failure() -> None:
    import os

    import pytest

    from allreduce import comm, errors
    from allreduce.cluster.leader import meeting

    meeting.PATIENCE = 0.5
    for name in ("RANK", "SIZE", "LEADER", "SECRET"):
        del os.environ[f"ALLREDUCE_{name}"]
    named: dict[str, Any] = {"rank": 1, "size": 2, "leader": "127.0.0.1:1", "secret": "hush-hush"}
    with pytest.raises(errors.UsageError, match="came without rank"):
        comm.init(size=2)
    for arguments in (named | {"timeout": 0.2}, {}):
        with pytest.raises((errors.JoinError, errors.TimeoutError), match="rank 1"):
            comm.init(**arguments)
    assert "hush" not in repr(comm._state)
    print("fine")


def _after_a_refusal() -> None:
    import os

    import pytest

    from allreduce import comm, errors

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with pytest.raises(errors.UnsupportedError, match="transport 'nccl' is for GPUs"):
        comm.init(transport="nccl")
    os.environ["ALLREDUCE_ACROSS"] = "pigeons"
    with pytest.raises(errors.UsageError, match="unknown transport between hosts 'pigeons'"):
        comm.init(transport="hierarchical")
    print(comm.init().transport)


def test_arguments_left_out_are_as_they_were() -> None:
    for result in run_ranks(_as_before, 2):
        assert result.stdout == "fine\n", result


def test_a_failed_attempt_is_repeated_for_the_same_world() -> None:
    (result,) = run_ranks(_after_a_failure, 1)
    assert result.stdout == "fine\n", result


def test_a_refused_transport_is_forgotten() -> None:
    for result in run_ranks(_after_a_refusal, 2):
        assert result.stdout == "shared\n", result


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "0"},
        {"rank": True},
        {"rank": 0.0},
        {"rank": -1},
        {"size": 0},
        {"leader": 5},
        {"leader": "here"},
        {"secret": 5},
        {"secret": b""},
        {"transport": 1},
        {"timeout": "5"},
        {"timeout": 1e10},
        {"timeout": float("inf")},
        {"timeout": 0},
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(errors.UsageError, match=rf"^{name}=.* is not valid: expected"):
        comm.init(**wrong)


def test_a_secret_is_not_shown() -> None:
    assert "hush" not in repr(Credentials("job", "name", b"hush"))
    with pytest.raises(errors.UsageError) as caught:
        comm.init(secret=8080)  # type: ignore[arg-type]
    assert "8080" not in str(caught.value)


def test_alone() -> None:
    (result,) = run_ranks(_alone, 1, env={}, launcher="run")
    assert "fine" in result.stdout, result


def test_anew_after_close_and_beside_replicas() -> None:
    for result in run_ranks(_anew, 2):
        assert result.stdout == "fine\n", result


def test_an_unknown_transport_is_named_with_those_there_are() -> None:
    (result,) = run_ranks(_unknown_transport, 1, env={"ALLREDUCE_TRANSPORT": "sharde"})
    there = f"there are {', '.join(sorted(REGISTRY))}"
    wanted = f"unknown transport 'sharde': {there}; did you mean 'shared'?"
    assert wanted in result.stdout


@pytest.mark.parametrize("name", REGISTRY)
def test_every_transport_has_a_line_on_the_page_of_collectives(name: str) -> None:
    page = (ROOT / "docs" / "collectives.md").read_text()
    assert page.count(f"\n- **`{name}`**: ") == 1


@pytest.mark.parametrize("name", [name for name in REGISTRY if not REGISTRY[name].for_devices])
def test_every_transport_of_the_host_passes_the_contract(name: str) -> None:
    tests = (ROOT / "tests" / "comm" / "transports" / name).glob("test_*.py")
    contract = re.compile(r"^class Test\w*\(.*\bContract(OfProcesses)?\b", re.MULTILINE)
    assert any(contract.search(path.read_text()) for path in tests)


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


def _set_up() -> None:
    import time

    from allreduce.comm import init

    began = time.monotonic()
    comm = init()
    took = time.monotonic() - began
    assert comm.all_reduce(1) == 32
    print(took)


@pytest.mark.torture
def test_32_ranks_on_one_host_are_set_up_in_5_seconds() -> None:
    (result,) = run_ranks(_set_up, 32, launcher="run", timeout=100)
    seconds = [float(line.split()[1]) for line in result.stdout.splitlines()]
    assert len(seconds) == 32, result
    assert max(seconds) < 5
