"""Factors before and after a reduction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator, replica_communicators
from allreduce.errors import UsageError
from tests.harness import run_threads, world_of_one


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """One of two members: a call that gets past its checks would wait for the other."""
    members = replica_communicators(world_of_one(), 2, name="scaling", timeout=20)
    yield members[1]
    for member in members:
        member.close()


WRONG: tuple[Any, ...] = (
    "2",
    None,
    True,
    np.array([1.0, 2.0]),
    np.array(2.0),
    2j,
    float("nan"),
    float("inf"),
    10**400,
    10**5000,
)


@pytest.mark.parametrize("factor", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("name", ["prescale", "postscale"])
def test_a_factor_that_is_no_finite_real_number(comm: Communicator, name: str, factor: Any) -> None:
    for collective in (comm.all_reduce, comm.reduce, comm.reduce_scatter):
        for x in (np.ones(2, "f4"), [np.ones(2, "f4")]):
            if isinstance(x, list) and collective == comm.reduce_scatter:
                continue
            with pytest.raises(UsageError, match=f"{name} must be a finite real number"):
                collective(x, **{name: factor})


def test_a_factor_must_be_one_of_the_arrays_type(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="of float32's range, but is 1e"):
        comm.all_reduce(np.ones(2, "f4"), prescale=1e300)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("out", ["new", "x", "other", "strided"])
def test_real_factors(dtype: str, out: str) -> None:
    def member(comm: Communicator) -> None:
        x = np.arange(6, dtype=dtype).reshape(2, 3)
        targets = {"new": None, "x": x, "other": np.zeros((2, 3), dtype)}
        target = targets.get(out, np.zeros((2, 6), dtype)[:, ::2])
        result = comm.all_reduce(x, prescale=0.5, postscale=np.float64(3), out=target)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, np.arange(6.0).reshape(2, 3) * 3)
        if target is not x:
            np.testing.assert_array_equal(x, np.arange(6.0).reshape(2, 3))

    run_threads(member, 2)


def test_halves_are_multiplied_as_they_are_summed() -> None:
    x = np.full(3, 60000, np.float16)
    for result in run_threads(lambda comm: comm.all_reduce(x, prescale=1e-6, postscale=1), 2):
        np.testing.assert_allclose(result, 0.12, rtol=2e-3)


def test_complex_factors_of_complex_arrays() -> None:
    x = np.ones(3, np.complex64)
    for result in run_threads(lambda comm: comm.all_reduce(x, prescale=1j, postscale=2), 2):
        np.testing.assert_array_equal(result, 4j)


def test_ones_are_no_factors() -> None:
    x = np.ones(3, np.int32)
    for result in run_threads(lambda comm: comm.all_reduce(x, prescale=1, postscale=1.0), 2):
        np.testing.assert_array_equal(result, 2)
