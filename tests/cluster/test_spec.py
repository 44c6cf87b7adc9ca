"""Descriptions of clusters: their forms, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allreduce.cluster.spec import ClusterSpec, own_task, parse_task
from allreduce.errors import UsageError

JOBS = {"ps": ["h0:2222"], "worker": ["h1:2222", "h2:2222"]}


def test_all_forms_describe_one_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(JOBS))
    spec = ClusterSpec(JOBS)
    config = {"cluster": JOBS, "task": {"type": "ps", "index": 0}}
    for form in (spec, file, str(file), json.dumps(JOBS), config, json.dumps(config)):
        assert ClusterSpec(form) == spec
    assert ClusterSpec(spec.as_json()) == spec
    assert list(spec) == [("worker", 0, "h1:2222"), ("worker", 1, "h2:2222"), ("ps", 0, "h0:2222")]
    assert spec.num_tasks("worker") == 2
    assert spec.num_tasks("evaluator") == 0
    sparse = ClusterSpec({"worker": {"3": "h3:1"}})
    assert sparse.address("worker", 3) == "h3:1"


def test_the_environment_names_this_task() -> None:
    config = json.dumps({"cluster": JOBS, "task": {"type": "worker", "index": 1}})
    assert own_task({}) is None
    assert own_task({"TF_CONFIG": config}) == (ClusterSpec(JOBS), "worker", 1)
    ours = {"ALLREDUCE_CLUSTER": json.dumps(JOBS), "ALLREDUCE_TASK": "ps:0", "TF_CONFIG": config}
    assert own_task(ours) == (ClusterSpec(JOBS), "ps", 0)
    assert parse_task("/job:worker/task:1") == parse_task("worker:1") == ("worker", 1)
    assert parse_task("ps") == ("ps", 0)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({}, "a cluster needs a job"),
        ({"worker": "h1:2222"}, "expected a list of host:port"),
        ({"worker": ["h1"]}, "has the address 'h1'; expected host:port"),
        ({"worker": ["h1:70000"]}, "has the address 'h1:70000'; expected host:port"),
        ({"my job": ["h1:1"]}, "a job 'my job'; expected a word"),
        ({"ps": ["h:1"], "worker": ["h:1"]}, "two tasks .* have the address 'h:1'"),
        ("{", "is not JSON"),
        ("[]", "cannot be read"),
        ({"worker": {"a": "h:1"}}, "a task 'a'; expected a number"),
        ({"worker": []}, "job 'worker' of the cluster has no tasks"),
        ({"worker": {}}, "job 'worker' of the cluster has no tasks"),
        (["h:1"], r"a cluster is \['h:1'\]; expected a dictionary"),
        (3, "a cluster is 3; expected a dictionary"),
        ("a\0b", "cannot be read"),
        ("/no/such/file.json", "No such file"),
    ],
)
def test_other_forms_are_refused(cluster: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ClusterSpec(cluster)  # type: ignore[arg-type]


def test_a_binary_file_and_a_strange_index_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"cluster\.json' is not text"):
        ClusterSpec(file)
    for index in ("x", -1, None):
        config = {"cluster": JOBS, "task": {"type": "worker", "index": index}}
        with pytest.raises(UsageError, match=f"TF_CONFIG has the task index {index!r}"):
            own_task({"TF_CONFIG": json.dumps(config)})


def test_tasks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="no task /job:ps/task:1; it has /job:worker/task:0"):
        ClusterSpec(JOBS).address("ps", 1)
    for text in ("worker 1", "worker:x", ""):
        with pytest.raises(UsageError, match="names no task"):
            parse_task(text)
    with pytest.raises(UsageError, match="without ALLREDUCE_TASK"):
        own_task({"ALLREDUCE_CLUSTER": json.dumps(JOBS)})
    with pytest.raises(UsageError, match="has no task /job:worker/task:5"):
        own_task({"ALLREDUCE_CLUSTER": json.dumps(JOBS), "ALLREDUCE_TASK": "worker:5"})
