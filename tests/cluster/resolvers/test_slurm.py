"""Worlds of Slurm steps; srun is imitated by its variables."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Mapping

import pytest

from allreduce import cluster
from allreduce.cluster.host.interfaces import interfaces
from allreduce.cluster.resolvers import rendezvous, slurm
from allreduce.errors import JoinError, TimeoutError, UsageError
from tests.cluster.conftest import Write
from tests.cluster.processes import run_together, running

SHOW = "print(world.rank, world.size, world.source, world.exchange('k', b'%d' % world.rank, 20))"


def task(rank: int, size: int, job: str, **more: str) -> dict[str, str]:
    told = {
        "JOB_ID": job,
        "STEP_ID": "3",
        "PROCID": str(rank),
        "STEP_NUM_TASKS": str(size),
        "STEP_NUM_NODES": "1",
        "STEP_NODELIST": "node1",
    } | more
    return {f"SLURM_{name}": text for name, text in told.items()}


@pytest.fixture
def job() -> str:
    return str(uuid.uuid4().int % 10**9)


@pytest.mark.parametrize("size", [2, 4])
def test_the_tasks_of_a_step_meet(script: Write, job: str, size: int) -> None:
    results = run_together(script(SHOW), [task(rank, size, job) for rank in range(size)])
    everybody = [b"%d" % rank for rank in range(size)]
    for rank, result in enumerate(results):
        assert (result.code, result.out) == (0, f"{rank} {size} slurm {everybody}\n"), result.err
    assert f"{size} ranks through slurm: SLURM_PROCID=0 of the {size} tasks" in results[0].err


def test_two_steps_of_one_job_do_not_mix(script: Write, job: str) -> None:
    told = [task(rank, 2, job, STEP_ID=step) for step in "45" for rank in range(2)]
    results = run_together(script(f"{SHOW}\nprint(world.job)"), told)
    jobs = [result.out.splitlines()[1] for result in results]
    assert jobs[0] == jobs[1] != jobs[2] == jobs[3]


def test_a_step_whose_pmi_the_library_does_not_hear_meets_at_a_leader(
    script: Write, job: str
) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install allreduce[mpich]")
    told = [task(rank, 2, job) | {"PMI_RANK": str(rank), "PMI_SIZE": "2"} for rank in range(2)]
    results = run_together(script(SHOW), told)
    assert [result.code for result in results] == [0, 0], results
    assert all(" 2 slurm " in result.out for result in results)


def test_a_task_that_never_comes_is_named(script: Write, job: str) -> None:
    told = [task(rank, 3, job) | {"ALLREDUCE_TIMEOUT": "2"} for rank in (0, 2)]
    results = run_together(script(SHOW, at_once=2), told)
    assert all("rank 1 did not join" in result.err for result in results), results


def test_a_missing_first_task_is_a_timeout(script: Write, job: str) -> None:
    (result,) = run_together(script(SHOW), [task(1, 2, job) | {"ALLREDUCE_TIMEOUT": "1"}])
    assert (
        "rank 1: task 0 of step " + f"{job}.3 did not publish its address within 1 s" in result.err
    )


def test_two_first_tasks_are_told_apart(script: Write, job: str) -> None:
    told = [task(rank, 3, job) | {"ALLREDUCE_TIMEOUT": "3"} for rank in (0, 0, 1)]
    results = run_together(script(SHOW, at_once=3), told)
    assert sum("has taken the meeting point" in result.err for result in results) == 1
    assert all(result.code != 0 for result in results)


def set_task(monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str]) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)


def test_a_step_on_several_hosts_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    set_task(monkeypatch, task(1, 4, "7", STEP_NUM_NODES="2", STEP_NODELIST="node[08-09]"))
    with pytest.raises(UsageError, match=re.escape("spans 2 hosts (node[08-09])")):
        cluster.join()


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        ("node1", ["node1"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[0-1]n[2,4]-ib", ["r0n2-ib", "r0n4-ib", "r1n2-ib", "r1n4-ib"]),
        ("10.0.0.1,10.0.0.2", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_lists_of_hosts_are_expanded(written: str, hosts: list[str]) -> None:
    assert slurm.expand(written) == hosts


def test_tasks_on_several_hosts_find_the_leader(script: Write, job: str) -> None:
    outside = next((one.address for one in interfaces()), None)
    if outside is None:
        pytest.skip("needs a network interface besides loopback")
    told = [
        task(rank, 3, job, STEP_NUM_NODES="2", STEP_NODELIST=f"{outside},{outside}")
        | {"SLURM_NODEID": str(min(rank, 1)), "ALLREDUCE_SECRET": "known to all"}
        for rank in range(3)
    ]
    ports = slurm.ports(f"{os.getuid()}/{job}.3", 1)
    with socket.create_server((outside, ports[0])):  # somebody else's, who never answers
        results = run_together(script(SHOW), told, deadline=30)
    assert [result.code for result in results] == [0, 0, 0], results
    assert "2 3 slurm" in results[2].out


@pytest.mark.parametrize("step", ["", "4294967291", "4294967290", "4294967292"])
def test_a_batch_script_is_alone(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    set_task(monkeypatch, task(0, 4, "7", STEP_ID=step))
    assert cluster.join().source == "single"


def test_a_step_of_one_task_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    set_task(monkeypatch, task(0, 1, "7"))
    world = cluster.join()
    assert (world.size, world.source) == (1, "slurm")


@pytest.mark.parametrize("wrong", [{"PROCID": "4"}, {"PROCID": ""}, {"STEP_NUM_TASKS": "many"}])
def test_a_task_that_does_not_know_its_place_is_an_error(wrong: dict[str, str]) -> None:
    with pytest.raises(JoinError, match=r"step 7\.3"):
        slurm.step(task(0, 4, "7", **wrong))


def test_a_beacon_is_seen_by_its_name_only_and_gone_after_closing() -> None:
    name = f"allreduce-test/{uuid.uuid4()}"
    publisher = rendezvous.Publisher(name, b"payload" * 1000)
    assert rendezvous.fetch(name, 25, "rank 1", "task 0") == b"payload" * 1000
    with pytest.raises(TimeoutError):
        rendezvous.fetch(name + "x", 0.2, "rank 1", "task 0")
    publisher.close()
    with pytest.raises(TimeoutError):
        rendezvous.fetch(name, 0.2, "rank 1", "task 0")


def test_another_users_beacon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"allreduce-test/{uuid.uuid4()}"
    publisher = rendezvous.Publisher(name, b"trap")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(JoinError, match=r"process \d+ of user \d+ holds the meeting point"):
        rendezvous.fetch(name, 25, "rank 1", "task 0")
    monkeypatch.undo()
    publisher.close()


def test_the_kernel_names_the_peer() -> None:
    name = f"allreduce-test/{uuid.uuid4()}"
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); s.recv(1)"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        listener.settimeout(20)
        with running([sys.executable, "-c", code]) as visiting:
            visitor, _ = listener.accept()
            with visitor:
                assert rendezvous.peer(visitor) == (visiting.pid, os.getuid())


def test_a_taken_meeting_point_leaves_no_leader(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    set_task(monkeypatch, task(0, 2, job))
    before = set(threading.enumerate())
    taken = rendezvous.Publisher(
        f"allreduce/{os.getuid()}/slurm/{job}.3/{cluster._generation}", b""
    )
    try:
        with pytest.raises(JoinError, match="has taken the meeting point"):
            cluster.join()
    finally:
        taken.close()
    made = set(threading.enumerate()) - before
    assert not [one.name for one in made if one.name == "allreduce-leader"]
