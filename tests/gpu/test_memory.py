"""Pools of memory: blocks that are released at any time, and memory that runs out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import allreduce as ar
from allreduce.devices.cuda import memory
from allreduce.errors import OutOfMemoryError
from tests.gpu import launch


def test_a_block_may_be_released_while_others_are_freed() -> None:
    """Freeing runs Python code, in which the collector may release blocks of further sizes."""
    addresses, freed = iter(range(1 << 20, 1 << 40, 1 << 20)), []
    held: list[memory.Block] = []

    def free(address: int) -> None:
        freed.append(address)
        held.clear()

    pool = memory.Pool(lambda size: next(addresses), free)
    first, second = pool.block(1 << 16), pool.block(1 << 17)
    held += [pool.block(1 << 18)]
    expected = [first.address, second.address]
    del first, second
    pool.trim()
    assert sorted(freed) == expected
    assert pool.nbytes == 1 << 18


def test_pinned_memory_that_runs_out_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: object, *arguments: object) -> int:
        raise OutOfMemoryError("cuMemHostAlloc found too little memory")

    monkeypatch.setattr(memory, "call", refuse)
    with pytest.raises(ar.OutOfMemoryError, match="the host cannot pin 1048576 bytes"):
        memory.PinnedPool(lambda: None).array((1 << 20,), "u1")


@pytest.mark.skipif(launch.has_driver(), reason="the stand-ins' kernels are compiled elsewhere")
def test_kernels_are_compiled_where_their_folder_cannot_be_used() -> None:
    text = """
import logging
logging.basicConfig(level=logging.INFO)
import numpy as np
from cuda.core import utils
import allreduce as ar
logging.getLogger("allreduce").setLevel(logging.INFO)
cache, attempts = utils.FileStreamProgramCache, []

def numbered():  # so that each error has a text of its own
    attempts.append(0)
    try:
        return cache()
    except OSError as error:
        raise OSError(f"attempt {len(attempts)}: {error}") from error

utils.FileStreamProgramCache = numbered
step = lambda x: ar.ops.sum(ar.ops.exp(x) + ar.ops.sum(x[:, ::2]))
print(ar.MirroredStrategy(["GPU:0"]).run(step, (np.zeros((2, 2), np.float32),)).values[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "XDG_CACHE_HOME": "/proc/none"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "4.0\n", done.stderr
    assert done.stderr.count("kernels are compiled in each process") == 1
