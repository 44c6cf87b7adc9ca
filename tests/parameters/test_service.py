"""A server serves one job after the other, and a restarted one goes on where its workers are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import MismatchError
from allreduce.parameters.dealing import TRAIN
from allreduce.parameters.row_ranges import FitSpec
from allreduce.parameters.service import ParameterService, TrainingJob
from allreduce.server.protocol.encode import configured

SPEC = FitSpec(rows=64, tests=0, batch_size=64, test_batch_size=64, first=0, epochs=3)
KINDS = [["loss", "mean"]]
Service = TrainingJob | ParameterService


def enter(service: Service, caller: str, task: str = "worker:0", **settings: Any) -> None:
    """Let a worker in, of a cluster of two."""
    is_chief = task == "worker:0"
    entering = {"task": task, "is_chief": is_chief, "workers": 2, "process": caller}
    service.call(caller, "enter", entering, [])
    fields = {"task": task, "cluster": "cluster", "seed": 1, "seed_is_set": True}
    given = {"update": "async", "checkpoint": None, **settings}
    service.call(caller, "join", {**fields, "settings": given}, [])


def begin(service: Service, caller: str, known: int = 0, spec: FitSpec = SPEC) -> dict[str, Any]:
    """Begin a call of `fit`, as a worker that knows the sums of some epochs."""
    arrays = [np.asarray(64.0)] * (2 * known)
    fields = {"fit": 1, "spec": spec.as_json(), "is_chief": True, "workers": 2, "task": "worker:0"}
    fields |= {"again": bool(known), "known": [{"epoch": e, TRAIN: KINDS} for e in range(known)]}
    return service.call(caller, "begin", fields, arrays)[0]


def ask(service: Service, caller: str, seen: int, done: Any = None) -> dict[str, Any]:
    """Ask what to do next, after an epoch of one part."""
    fields = {"fit": 1, "seen": seen, "stops": False, "is_chief": True}
    arrays = [] if done is None else [np.asarray(64.0)] * 2
    return service.call(caller, "next", fields | ({"done": done} if done else {}), arrays)[0]


def train(service: Service, caller: str, epochs: int, first: int = 0) -> None:
    for epoch in range(first, first + epochs):
        part = ask(service, caller, epoch)
        assert (part["what"], part["epoch"]) == (TRAIN, epoch)
        done = {"part": part["part"], "epoch": epoch, "names": KINDS}
        assert ask(service, caller, epoch, done)["what"] == "epoch"


def test_another_job_on_the_same_servers_trains_anew() -> None:
    service = ParameterService()
    for update in ("async", "sync"):
        settings: dict[str, Any] = {
            "update": update,
            "replicas_to_aggregate": 1,
            "total_replicas": 1,
        }
        enter(service, f"{update}-a", **settings)
        enter(service, f"{update}-b", "worker:1", **settings)
        assert begin(service, f"{update}-a") == {"epoch": 0}
        train(service, f"{update}-a", 3)
        assert ask(service, f"{update}-a", 3)["what"] == "end"
        service.lose(f"{update}-a", has_left=True)
        service.lose(f"{update}-b", has_left=True)


def test_the_next_job_goes_on_from_the_last_update(tmp_path: Path) -> None:
    service = ParameterService()
    table = {"store": "table", "name": "table", "first": 0, "stop": 4, "width": 1}
    table |= {"dtype": "float32", "server": "/job:ps/task:0", "index": 0, "servers": 1}
    table |= {"checkpoint": str(tmp_path), "checkpoint_every": 100, "fills": False}
    enter(service, "a")
    enter(service, "b", "worker:1")
    service.call("a", "register_table", {**table, "fills": True}, [])
    rows = np.ones((4, 1), np.float32)
    service.call("a", "fill", {"store": "table", "row": 0, "last": True}, [rows])
    push = {"store": "table", "count": 1.0, "seen": 0, "worker": "a", "number": 1}
    gradients = [np.asarray([2]), rows[:1]]
    # Of a worker that has not noticed the server's restart; the gradient must not be lost.
    assert service.call("a", "push_rows", push, gradients)[0] == {"unknown": True}
    configure = {"store": "table", "optimizer": configured(ar.optim.SGD(1.0)), "if_missing": True}
    service.call("a", "configure", configure, [])
    assert service.call("a", "push_rows", push, gradients)[0]["version"] == 1
    for worker in "ab":
        service.lose(worker, has_left=True)
    enter(service, "c")
    reply, _ = service.call("c", "register_table", table, [])
    assert (reply["version"], reply["restored"]) == (1, True)


def test_a_worker_that_has_died_finds_its_job() -> None:
    service = ParameterService()
    enter(service, "a")
    enter(service, "b", "worker:1")
    begin(service, "a")
    train(service, "a", 2)
    service.lose("b", has_left=False)
    service.lose("a", has_left=False)
    enter(service, "a2")
    assert begin(service, "a2") == {"epoch": 2}
    train(service, "a2", 1, first=2)
    service.lose("a2", has_left=True)
    enter(service, "b2", "worker:1")  # late, and not of another job
    assert begin(service, "b2") == {"epoch": 3}


def test_a_restarted_server_learns_the_epochs_that_workers_know(tmp_path: Path) -> None:
    service = TrainingJob()
    enter(service, "a", checkpoint=str(tmp_path))
    begin(service, "a")
    train(service, "a", 1)
    assert service._progress is not None
    path, writer = service._progress
    writer.wait()
    again = TrainingJob()
    enter(again, "a2", checkpoint=str(tmp_path))
    assert again._fits[1].epoch == 1
    assert ask(again, "a2", 2) == {"unknown": True}  # the worker knows an epoch more
    assert begin(again, "a2", known=2) == {"epoch": 2}
    train(again, "a2", 1, first=2)
    enter(again, "b2", "worker:1", checkpoint=str(tmp_path))
    assert path.exists()
    again.lose("a2", has_left=True)
    again.lose("b2", has_left=True)
    assert not path.exists()  # for the next job to begin its own


def test_the_progress_of_a_job_that_has_ended_is_ignored(tmp_path: Path) -> None:
    service = TrainingJob()
    enter(service, "a", checkpoint=str(tmp_path))
    begin(service, "a")
    train(service, "a", 3)
    service.close()
    again = TrainingJob()  # for the next job in the same folder
    enter(again, "a", checkpoint=str(tmp_path))
    assert begin(again, "a") == {"epoch": 0}


def test_another_process_of_a_task_waits_until_the_first_one_is_dead() -> None:
    service = TrainingJob()
    enter(service, "a")
    fields = {"task": "worker:0", "is_chief": True, "workers": 2}
    assert service.call("b", "enter", {**fields, "process": "b"}, [])[0] == {"other": "a"}
    assert service.call("a.2", "enter", {**fields, "process": "a"}, [])[0] == {}
    service.lose("a")
    service.lose("a.2")
    assert service.call("b", "enter", {**fields, "process": "b"}, [])[0] == {}


def test_a_worker_with_another_cluster_is_refused() -> None:
    service = TrainingJob()
    enter(service, "a")
    fields = {"task": "worker:1", "settings": {}, "cluster": "other"}
    with pytest.raises(MismatchError, match="worker:1 has another cluster"):
        service.call("b", "join", fields, [])


def test_another_call_of_fit_is_refused_with_the_argument_that_differs() -> None:
    service = TrainingJob()
    enter(service, "a")
    begin(service, "a")
    with pytest.raises(MismatchError, match="has batch_size=32, but on the chief batch_size=64"):
        begin(service, "b", spec=replace(SPEC, batch_size=32))
