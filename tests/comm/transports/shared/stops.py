"""Rank 1 of two is stopped while it stores into rank 0's arrays, and goes on after the error."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from allreduce import _native, errors
from allreduce.comm import Communicator, Work, init, world
from allreduce.comm.fused_update import part_of, update_init
from allreduce.comm.transports.shared import memory
from tests.comm.cases.collective_cases import Array
from tests.harness import stop

_CATCH_SECONDS = 45.0
_AFTER_SECONDS = 0.3  # in which stores are looked for after rank 1 has seen the end


def stop_in_a_store(folder: str, count: int, what: str, ending: str) -> None:
    """Be one of two ranks; rank 0 prints how many elements rank 1 has changed after the error.

    Args:
        folder: Where rank 1 writes its error.
        count: Elements of an array.
        what: "reduce" or "update".
        ending: How rank 0's call ends: "timeout", "short" of memory, "abort" or "leave".
    """
    comm = init(transport="shared", timeout=60)
    told = Path(folder, "told")
    x, slots, start = _arrays(comm, count, what)
    if comm.rank == 1:
        _work_until_the_end(comm, x, start, told)
    work, pid = _catch(comm, x, start), world().members[1].pid
    notes = _end(comm, work, ending)
    theirs = x if ending == "leave" else part_of(comm, slots, 1)
    x[:] = -7
    kept = theirs.copy()
    os.kill(pid, signal.SIGCONT)
    until, end = time.monotonic() + 25, 0.0
    changed = [0, 0]
    while time.monotonic() < (end or until) and not any(changed):
        if not end and told.exists():
            end = time.monotonic() + _AFTER_SECONDS
        changed = [int((x != -7).sum()), int((theirs != kept).sum())]
    os.kill(pid, signal.SIGKILL)
    print(told.exists(), *changed, *notes, flush=True)
    os._exit(0)


def _arrays(comm: Communicator, count: int, what: str) -> tuple[Array, Array, Callable[[], Work]]:
    """Return the output, what an update keeps of it, and what starts the call."""
    x, slots, gradients = (comm.empty(count, "float32") for _ in range(3))
    slots[:], gradients[:] = 0, 1
    if what == "reduce":
        return x, slots, lambda: comm.all_reduce(x, op="max", out=x, async_op=True)
    header = np.ones(16, "float32")
    update = _native.rule_update("sgd", header, [slots])
    update.set([0.5, 0.9, 0.0])
    update.expect(b"", False)
    return x, slots, update_init(comm, gradients, x, update, header)


def _begin(comm: Communicator, x: Array, start: Callable[[], Work]) -> Work:
    x[:] = 1 + 2 * comm.rank
    comm.barrier()
    return start()


def _work_until_the_end(
    comm: Communicator, x: Array, start: Callable[[], Work], told: Path
) -> None:
    try:
        while True:
            _begin(comm, x, start).wait()
            comm.barrier()
    except errors.AllreduceError as error:
        told.write_text(str(error))
    time.sleep(40)  # rank 0 ends this process
    os._exit(1)


def _catch(comm: Communicator, x: Array, start: Callable[[], Work]) -> Work:
    """Start calls until rank 1 is stopped in the middle of its slice, the second half."""
    pid, until = world().members[1].pid, time.monotonic() + _CATCH_SECONDS
    while time.monotonic() < until:
        work = _begin(comm, x, start)
        while x[len(x) // 2] == 1 and time.monotonic() < until:
            pass
        stop(pid)
        if x[-1] == 1:
            return work
        os.kill(pid, signal.SIGCONT)  # it was faster
        work.wait()
        comm.barrier()
    raise AssertionError("rank 1 could not be stopped in a step")


def _end(comm: Communicator, work: Work, ending: str) -> list[str]:
    """End the communicator; returns what is noted of the error."""
    transport: Any = comm._dispatch.transport
    if ending == "abort":
        comm.abort("enough")
    elif ending == "leave":
        transport.close(drain=False)
    else:
        if ending == "short":
            memory.check_available = _refuse
        try:
            work.wait(timeout=0.5)
        except errors.TimeoutError as error:
            with contextlib.suppress(errors.ClosedError):
                transport.check_alive()  # a second error needs no second warning
            return list(getattr(error, "__notes__", ()))
    return []


def _refuse(nbytes: int) -> None:
    raise OSError(12, f"{nbytes} bytes are needed")
