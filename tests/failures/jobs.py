"""Whole jobs under a launcher, and the search for remains of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes import Result, Running, mpirun, running

SCRIPT = Path(__file__).with_name("broken_job.py")
SHARED_MEMORY = Path("/dev/shm")
_MAPPED = re.compile(rf" {SHARED_MEMORY}/(\S+)")
DEADLINE = 25.0  # seconds; short of the job's own patience, which is 300, and of a rank's sleep
_SAMPLE_SECONDS = 0.1
_TAG = "TEST_JOB"  # every process of a job inherits it: that is how none escapes the search


@dataclass
class Job:
    """A running job.

    Attributes:
        process: The launcher.
        size: How many ranks.
    """

    process: Running
    size: int
    _tag: bytes
    _folder: Path
    _shared: set[str]  # the names of files that its processes were seen to map
    _lines: list[str]

    def ready(self) -> list[int]:
        """Wait until every rank is where the test wants it; returns their processes."""
        pids = [int(self._line("ready")) for _ in range(self.size)]
        self._look()
        time.sleep(0.3)
        return pids

    def finish(self, deadline: float) -> Result:
        """Wait for the launcher's end; its output includes earlier lines."""
        result = self.process.finish(deadline)
        out = "\n".join(self._lines) + "\n" + result.out
        return Result(result.code, out, result.err, result.seconds)

    def finish_after_action(self) -> Result:
        """Wait for the victim's action, then for the launcher's end."""
        self._line("acts")
        return self.finish(DEADLINE)

    def living(self) -> list[int]:
        """Find the job's processes, whoever their parents are now."""
        return [
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._is(pid)
        ]

    def kill(self) -> None:
        """Kill every process of the job, as the kernel short of memory would."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def assert_nothing_left(self, seconds: float = DEADLINE, but: str | None = None) -> None:
        """Fail unless, soon, no process, file or shared memory of the job is left.

        Args:
            seconds: The time limit.
            but: Prefixes of shared memory that other libraries leave.
        """
        deadline = time.monotonic() + seconds
        while (left := self._left(but)) != ([], [], []) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == ([], [], []), left

    def _left(self, but: str | None) -> tuple[list[int], list[str], list[str]]:
        left = sorted(self._shared & set(os.listdir(SHARED_MEMORY)))
        ours = [name for name in left if but is None or not name.startswith(but)]
        return self.living(), sorted(os.listdir(self._folder)), ours

    def watch(self, over: threading.Event) -> None:
        """Note which shared memory the job's processes map, until `over`."""
        while not over.wait(_SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        for pid in self.living():
            with contextlib.suppress(OSError):  # it has ended
                self._shared.update(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))

    def _is(self, pid: int) -> bool:
        try:
            return self._tag in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            return False

    def _line(self, word: str) -> str:
        """Read lines up to the one that begins with `word`, past a rank's prefix."""
        while line := self.process.line():
            self._lines.append(line)
            found, _, rest = line.rpartition("] ")[2].partition(" ")
            if found == word:
                return rest
        raise AssertionError(f"no {word!r} came: {self._lines}; {self.process.finish(DEADLINE)}")


@contextlib.contextmanager
def start(
    launcher: str,
    size: int,
    script: Path,
    *arguments: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Start a job for the block; nothing of it survives the block.

    Args:
        launcher: "mpirun" or "run", ours.
        size: How many ranks.
        script: The script of each rank.
        arguments: The script's arguments.
        folder: An empty one, the job's for temporary files.
        env: Further environment variables.
    """
    ours = [sys.executable, "-m", "allreduce.run", "-n", str(size), str(script), *arguments]
    command = mpirun(size, script, *arguments) if launcher == "mpirun" else ours
    tag = uuid.uuid4().hex
    own = {_TAG: tag, "TMPDIR": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    with running(command, own | dict(env or {})) as process:
        job = Job(process, size, f"{_TAG}={tag}".encode(), folder, set(), [])
        over = threading.Event()
        watcher = threading.Thread(target=job.watch, args=(over,))
        watcher.start()
        try:
            yield job
        finally:
            over.set()
            watcher.join()
            job.kill()
