"""Worlds of a described cluster's workers, and of torchrun's ranks."""

from __future__ import annotations

import json

import pytest

from allreduce import cluster
from allreduce.errors import JoinError, UsageError
from tests.cluster.conftest import Write
from tests.cluster.processes import free_address, run_together

SHOW = "print(world.rank, world.size, world.source, world.exchange('k', b'%d' % world.rank, 20))"


def _config(job: str, task: int, workers: list[str]) -> dict[str, str]:
    jobs = {"chief": workers[:1], "worker": workers[1:], "ps": ["127.0.0.1:9"]}
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": job, "index": task}})}


def test_chief_and_workers_join(script: Write) -> None:
    workers = [free_address(), free_address(), free_address()]
    places = [("chief", 0), ("worker", 0), ("worker", 1)]
    results = run_together(
        script(SHOW), [_config(*place, workers) for place in places], deadline=60
    )
    values = [b"0", b"1", b"2"]
    for rank, result in enumerate(results):
        assert result.code == 0, result.err
        assert result.out.strip() == f"{rank} 3 tasks {values}"


def test_a_task_can_be_named_as_the_leader(script: Write) -> None:
    workers = [free_address(), free_address()]
    places = [("chief", 0), ("worker", 0)]
    named = {"ALLREDUCE_LEADER": "/job:chief/task:0"}
    environments = [_config(*place, workers) | named for place in places]
    results = run_together(script(SHOW), environments, deadline=60)
    for rank, result in enumerate(results):
        assert result.code == 0, result.err
        assert result.out.split()[:3] == [str(rank), "2", "leader"]


@pytest.mark.parametrize("mark", ["TORCHELASTIC_RUN_ID", "LOCAL_RANK"])
def test_torchruns_ranks_join(script: Write, mark: str) -> None:
    host, _, port = free_address().rpartition(":")
    common = {
        mark: "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(int(port) - 1),
    }
    places = [{**common, "RANK": str(rank)} for rank in range(2)]
    results = run_together(script(SHOW), places, deadline=60)
    for rank, result in enumerate(results):
        assert result.code == 0, result.err
        assert result.out.split()[:3] == [str(rank), "2", "torchrun"]


def test_what_names_no_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no cluster is described"):
        cluster.join(leader="/job:worker/task:0")
    for name, value in _config("ps", 0, ["h:1", "h:2"]).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="ps:0 makes no collective calls"):
        cluster.join(leader="/job:worker/task:0")
    monkeypatch.delenv("TF_CONFIG")
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(JoinError, match="RANK='5' and WORLD_SIZE='1'"):
        cluster.join()
    monkeypatch.setenv("RANK", "0")
    for port in ("abc", "65535"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(UsageError, match=f"MASTER_PORT='{port}'; expected a number"):
            cluster.join()
