"""Ranks that are killed under the launcher: survivors name them in time, and nothing is left."""

from __future__ import annotations

import pytest

from allreduce.comm.registry import REGISTRY
from tests.comm.failures.kills import kill_all, kill_one

LIMIT_SECONDS = 0.5  # from the kill to the error on each survivor: of 100, 99 make it
PATIENT_SECONDS = 20.0  # for a few kills on a machine that does other things, too
ENGINE_DESCRIPTORS = 2  # that a process which has used tcp keeps
OF_ONE_HOST = [name for name in ("shared", "tcp", "hierarchical") if name in REGISTRY]


@pytest.mark.parametrize(
    ("transport", "size", "kills"), [("shared", 3, 1), ("tcp", 3, 1), ("hierarchical", 4, 1)]
)
def test_survivors_of_a_kill_name_the_dead_in_time(transport: str, size: int, kills: int) -> None:
    for seed in range(kills):
        for loss in kill_one(transport, size, seed):
            assert loss.seconds <= PATIENT_SECONDS, (seed, loss)
            assert loss.descriptors <= ENGINE_DESCRIPTORS, (seed, loss)


@pytest.mark.torture
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("transport", OF_ONE_HOST)
def test_survivors_of_200_kills_name_the_dead_in_time(transport: str) -> None:
    losses = [loss for seed in range(200) for loss in kill_one(transport, 2 + seed % 3, seed)]
    seconds = sorted(loss.seconds for loss in losses)
    assert seconds[len(seconds) * 99 // 100] <= LIMIT_SECONDS, seconds[-20:]
    assert max(loss.descriptors for loss in losses) <= ENGINE_DESCRIPTORS


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_nothing_is_left_of_a_job_that_is_killed(transport: str) -> None:
    kill_all(transport, 3, 0)


@pytest.mark.torture
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("transport", OF_ONE_HOST)
def test_nothing_is_left_of_200_jobs_that_are_killed(transport: str) -> None:
    for seed in range(200):
        kill_all(transport, 2 + seed % 3, seed)
