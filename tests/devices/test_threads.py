"""BLAS threads: the deciding setting, and a limit that reaches the library and stays."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import numpy as np
import pytest
import threadpoolctl

from allreduce.devices import affinity_cores, blas_threads, limit_blas_threads, options
from allreduce.errors import UsageError


@pytest.fixture(autouse=True)
def keep_settings() -> Iterator[None]:
    before = options.current()
    with threadpoolctl.threadpool_limits(user_api="blas"):
        yield
    options.set_intra_op_threads(before.intra_op_threads)


def blas_now() -> set[int]:
    np.ones((2, 2)) @ np.ones((2, 2))
    pools = threadpoolctl.threadpool_info()
    return {pool["num_threads"] for pool in pools if pool["user_api"] == "blas"}


def test_replicas_share_the_cores_of_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert affinity_cores() == 8
    assert [blas_threads(replicas, {}) for replicas in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_the_mask_of_this_process_is_what_counts() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert blas_threads(1, {}) == 1
    finally:
        os.sched_setaffinity(0, mask)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "7"}, 2),
        ({"MKL_NUM_THREADS": "6"}, 6),
        ({"OMP_NUM_THREADS": ""}, 1),
    ],
)
def test_the_users_variables_win_over_the_rule(environ: dict[str, str], expected: int) -> None:
    assert blas_threads(10**6, environ) == expected


def test_a_variable_that_is_no_number_is_named(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("allreduce")
    logger.addHandler(caplog.handler)
    try:
        assert blas_threads(10**6, {"OMP_NUM_THREADS": "many"}) == 1
    finally:
        logger.removeHandler(caplog.handler)
    assert "OMP_NUM_THREADS='many'" in caplog.text


def test_the_users_setting_wins_over_all() -> None:
    options.set_intra_op_threads(3)
    assert blas_threads(1, {"OMP_NUM_THREADS": "2"}) == 3
    options.set_intra_op_threads(None)
    assert blas_threads(1, {"OMP_NUM_THREADS": "2"}) == 2


def test_the_limit_reaches_blas_and_stays() -> None:
    limit_blas_threads(2)
    assert blas_now() == {2}
    limit_blas_threads(1)
    limit_blas_threads(1)
    assert blas_now() == {1}


def test_numbers_below_one_are_errors() -> None:
    with pytest.raises(UsageError, match="replicas is an integer from 1, not 0"):
        blas_threads(0)
    with pytest.raises(UsageError, match="threads is an integer from 1, not"):
        limit_blas_threads(0)
    for count in (0, -2, 1.5, True):
        with pytest.raises(UsageError, match="threads is an integer from 1"):
            options.set_intra_op_threads(count)  # type: ignore[arg-type]
