"""Arrays of PyTorch and of JAX in every transport's collectives, where these are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.comm.pool import MpiPool, ProcessPool, Runner, placed


@pytest.fixture(params=["torch", "jax"])
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install {name}")
    return name


@pytest.fixture(params=["shared", "tcp", "hierarchical", "mpi"])
def run(library: str, request: pytest.FixtureRequest) -> Iterator[Runner]:
    hosts = "aab" if request.param == "hierarchical" else "aa"
    mpi = request.param == "mpi"
    pool = MpiPool(2) if mpi else ProcessPool(len(hosts), request.param, placed(hosts))
    yield pool.run
    assert set(pool.close()) == {0}


def test_arrays_of_another_library(run: Runner, library: str) -> None:
    run(f"of_{library}")
