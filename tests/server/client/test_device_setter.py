"""Variables over the tasks of a job: in turn, or by their bytes."""

from __future__ import annotations

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import UsageError

JOBS = {"ps": ["h:1", "h:2"], "worker": ["h:3"]}
SIZES = (8, 1, 2, 4)


def _tasks(strategy: str) -> list[int | None]:
    with ar.device(ar.device_setter(JOBS, strategy=strategy)):
        made = [ar.Variable(np.zeros(size, np.float32)) for size in SIZES]
    assert all(each.place.job == "ps" for each in made)
    return [each.place.task for each in made]


def test_variables_go_to_tasks_in_turn_or_by_bytes() -> None:
    assert _tasks("round_robin") == [0, 1, 0, 1]
    assert _tasks("bytes") == [0, 1, 1, 1]


def test_the_cluster_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="none is in the environment"):
        ar.device_setter()
    monkeypatch.setenv("ALLREDUCE_CLUSTER", '{"ps": ["h:1"], "worker": ["h:2"]}')
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:0")
    with ar.device(ar.device_setter()):
        assert ar.Variable(0.0).place.job == "ps"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="no job 'ps'"):
        ar.device_setter({"worker": ["h:1"]})
    with pytest.raises(UsageError, match="there are round_robin, bytes"):
        ar.device_setter(JOBS, strategy="largest")
