"""The search for remains of a job finds its own shared memory, and no other."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.failures.jobs import SHARED_MEMORY, start

MAPS = """
import mmap, os, sys, time
_, own, gate = sys.argv
with open(own, "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
    print("ready", os.getpid(), flush=True)
    while not os.path.exists(gate):
        time.sleep(0.02)
"""


def test_only_the_jobs_own_shared_memory_counts(tmp_path: Path) -> None:
    script, folder = tmp_path / "maps.py", tmp_path / "tmp"
    script.write_text(MAPS)
    folder.mkdir()
    own, other = (SHARED_MEMORY / f"test.{uuid.uuid4().hex}" for _ in range(2))
    try:
        with start("run", 1, script, str(own), str(other), folder=folder) as job:
            job.ready()
            other.touch()  # which lets it end
            assert job.finish(25).code == 0
            with pytest.raises(AssertionError, match=own.name):
                job.assert_nothing_left(0.1)
            own.unlink()
            job.assert_nothing_left(0.1)
    finally:
        own.unlink(missing_ok=True)
        other.unlink()
