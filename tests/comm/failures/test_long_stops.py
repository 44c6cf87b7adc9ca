"""Ranks that are stopped for longer than it takes to find a lost host go on afterwards."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.cluster.processes import running
from tests.harness import run_ranks, script_of
from tests.run.launches import LAUNCH

STOPPED_SECONDS = 40  # the kernel takes 25 to find a lost host


def _stop_the_other(transport: str, small: bool, seconds: int) -> None:
    """Stop rank 1 while rank 0 sends it data, more than the kernels take, and let it go on."""
    import os
    import signal
    import threading
    import time

    import numpy as np

    from allreduce.comm import init, world

    os.environ["ALLREDUCE_HOST"] = os.environ["ALLREDUCE_RANK"]
    comm = init(transport=transport, timeout=120)
    x = np.ones(1000 if small else 1 << 24, "float32")
    began = time.monotonic()
    comm.barrier()
    other = world().members[1].pid
    if comm.rank == 0 and small:  # its data go with the words of calls that rank 1 has yet to make
        os.kill(other, signal.SIGSTOP)
    works = [comm.all_reduce(x, async_op=True) for _ in range(100 if small else 4)]
    if comm.rank == 0:
        if not small:
            time.sleep(0.05)  # of some 0.3 s
            os.kill(other, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (other, signal.SIGCONT)).start()
    assert all((work.wait() == 2).all() for work in works)
    assert time.monotonic() - began > seconds
    for _ in range(3):
        assert (comm.all_reduce(x) == 2).all()


@pytest.mark.torture
@pytest.mark.timeout(180)
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("transport", ["tcp", "hierarchical"])
def test_a_rank_that_was_stopped_for_long_goes_on(transport: str, small: bool) -> None:
    arguments = (transport, small, STOPPED_SECONDS)
    results = run_ranks(_stop_the_other, 2, arguments=arguments, timeout=150)
    assert not any(result.returncode for result in results), results


def _reduce_until(folder: str) -> None:
    """Repeat a call until this is to end, and show that all goes well."""
    from pathlib import Path

    import numpy as np

    from allreduce.comm import init

    comm = init(transport="tcp", timeout=120)
    x = np.ones(1 << 24, "float32")
    for step in range(10**9):
        assert (comm.all_reduce(x) == 2).all()
        if comm.rank == 0:
            Path(folder, "steps").write_text(str(step))
        if comm.all_reduce(float(Path(folder, "end").exists())):
            break


@pytest.mark.torture
@pytest.mark.timeout(180)
def test_a_job_that_was_stopped_by_its_terminal_for_long_goes_on(tmp_path: Path) -> None:
    script, steps = tmp_path / "program.py", tmp_path / "steps"
    script.write_text(script_of(_reduce_until, str(tmp_path)))
    with running([*LAUNCH, "-n", "2", str(script)]) as process:
        deadline = time.monotonic() + 30
        while not steps.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.signal(signal.SIGTSTP)
        time.sleep(STOPPED_SECONDS)
        (tmp_path / "end").touch()
        process.signal(signal.SIGCONT)
        ended = process.finish(30)
        assert ended.code == 0, ended
