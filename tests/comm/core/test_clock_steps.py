"""A system clock that is set back makes no wait longer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import clean_environment, run_commands, script_of

# The process reads a system clock that is a minute ahead of the kernel's: a wait until a time of
# that clock ends as late as if the clock were set back by a minute once the wait has begun.
AHEAD = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
extern "C" int clock_gettime(clockid_t id, timespec* now) noexcept {
  const long code = syscall(SYS_clock_gettime, id, now);
  if (id == CLOCK_REALTIME) now->tv_sec += 60;
  return static_cast<int>(code);
}
"""


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a library that shifts a process's clock; skip if this machine cannot."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("clock")
    source, library = folder / "ahead.cpp", folder / "ahead.so"
    source.write_text(AHEAD)
    command = [compiler, "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    return library


def _waits() -> None:
    import signal
    import threading
    import time

    import numpy as np

    from allreduce import errors
    from allreduce.comm import replica_communicators
    from tests.harness import world_of_one

    began = time.monotonic()
    for name in ("timeout", "interrupt"):
        comm, _ = replica_communicators(world_of_one(), 2, name=name, timeout=60)
        seconds = 0.5 if name == "timeout" else 45
        try:
            if name == "interrupt":
                interrupt = (threading.main_thread().ident, signal.SIGINT)
                threading.Timer(0.5, signal.pthread_kill, interrupt).start()
            comm.all_reduce(np.ones(3), async_op=True).wait(seconds)
        except (errors.TimeoutError, KeyboardInterrupt) as error:
            print(name, type(error).__name__, time.monotonic() - began < 40)


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_a_clock_that_is_set_back_delays_no_timeout_and_no_ctrl_c(
    transport: str, ahead: Path
) -> None:
    own = {"LD_PRELOAD": str(ahead), "ALLREDUCE_TRANSPORT": transport}
    command = [sys.executable, "-c", script_of(_waits)]
    (result,) = run_commands([command], [{**clean_environment(), **own}], 100)
    assert result.stdout.splitlines() == [
        "timeout TimeoutError True",
        "interrupt KeyboardInterrupt True",
    ], result
