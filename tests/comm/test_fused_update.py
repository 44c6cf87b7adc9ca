"""Fused updates: every member updates its own slice, for all members."""

from __future__ import annotations

import gc
import json
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import _native
from allreduce.comm import Communicator, fused_update, replica_communicators
from allreduce.errors import MismatchError
from tests.comm.cases.updates import COUNT, Side
from tests.harness import run_ranks, until_stopped, world_of_one


def _on_two(name: str, act: Callable[[Communicator], Any]) -> list[Any]:
    """Let two members of this process act, each in a thread; return results or errors."""
    members = replica_communicators(world_of_one(), 2, name=name, timeout=20)
    found: list[Any] = [None, None]

    def run(index: int) -> None:
        try:
            found[index] = act(members[index])
        except MismatchError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    for member in members:
        member.close()
    return found


def test_every_member_has_what_all_gradients_make_of_the_values() -> None:
    def act(comm: Communicator) -> list[float]:
        side = Side(comm)
        update = side.momentum()
        start = fused_update.update_init(comm, side.gradients, side.values, update, side.velocity)
        start().wait()
        comm.barrier()
        return [float(each) for each in np.unique(side.values)]

    # The mean of two gradients of 1 over 2 samples is 1.
    assert _on_two("updating", act) == [[-0.5], [-0.5]]


def test_sums_wait_for_an_update_by_another_divisor() -> None:
    def act(comm: Communicator) -> list[list[float]]:
        side, divisor = Side(comm), np.zeros(1, np.float32)
        update = side.momentum()
        update.use_sums(divisor)
        add = fused_update.sum_init(comm, side.gradients)
        start = fused_update.update_init(comm, side.gradients, side.values, update, divisor)
        found = []
        for _ in range(2):
            side.gradients[:] = comm.rank + 1
            comm.barrier()
            add().wait()
            own = side.gradients[slice(*_native.slice_bounds(COUNT, 4, 2, comm.rank))]
            found.append([*np.unique(own), *np.unique(side.values)])
            divisor[:] = 6  # not the 2 samples of the header
            start().wait()
            comm.barrier()
        return [*found, [*np.unique(side.values)]]

    # Gradients of 1 and 2 over 6 are 0.5 and the rate, too; then the velocity's 0.9 is added.
    for found in _on_two("in two calls", act):
        np.testing.assert_allclose(np.concatenate(found), [3, 0, 3, -0.25, -0.725], rtol=1e-6)


def test_what_a_dropped_work_needs_lives_until_it_is_done() -> None:
    def act(comm: Communicator) -> list[float]:
        side = Side(comm)
        if comm.rank == 1:
            time.sleep(0.3)  # the other one's call waits
        start = fused_update.update_init(
            comm, side.gradients, side.values, side.momentum(), side.velocity
        )
        start()
        del start
        gc.collect()
        junk = [bytearray(b"\x41" * size) for size in range(64, 160, 8) for _ in range(200)]
        comm.barrier()
        assert junk
        return [float(each) for each in np.unique(side.values)]

    assert _on_two("dropped", act) == [[-0.5], [-0.5]]


def test_members_with_other_rules_are_told() -> None:
    def act(comm: Communicator) -> None:
        side = Side(comm)
        update = side.momentum() if comm.rank else side.adam()
        fused_update.update_init(comm, side.gradients, side.values, update, side.velocity)().wait()

    for error in _on_two("rules", act):
        assert isinstance(error, MismatchError)
        assert "sgd)" in str(error)
        assert "adam)" in str(error)


def test_a_header_has_what_is_expected_of_it() -> None:
    header = np.zeros(2, np.float32)
    update = _native.rule_update("sgd", header, [np.zeros(3, np.float32)])
    update.expect(bytes(4), False)
    with pytest.raises(ValueError, match="more bytes than the header has"):
        update.expect(bytes(5), False)


def until_left(how: str, pid: int, told: Path) -> None:
    """Wait until a rank has been interrupted, which it tells by a file, stopped or killed."""
    if how == "SIGSTOP":
        until_stopped(pid)
    elif how == "SIGKILL":
        select.select([os.pidfd_open(pid)], [], [])
    while how == "SIGINT" and not told.exists():
        time.sleep(0.01)


def _fails_in_steps(folder: str, clips: bool) -> None:
    """Train with three strategies, whose updates rank 1 leaves: interrupted, stopped, killed.

    Args:
        folder: Where rank 1 writes that it is about to leave one; the others come later than that.
        clips: Whether gradients are clipped by their norm.
    """
    import json
    import os
    import signal
    import threading
    import time
    from pathlib import Path
    from unittest import mock

    import numpy as np

    import allreduce as ar
    from allreduce.comm.transports.native import NativeTransport
    from allreduce.graph.execute import sharded_instructions
    from tests.comm.test_fused_update import until_left

    def step(x: ar.Tensor) -> None:
        optimizer.minimize(ar.ops.sum(x @ w, axis=1), [w])

    def run() -> list[str]:
        try:
            strategy.run(step, args=batch)
        except (ar.AllreduceError, KeyboardInterrupt) as error:
            return [type(error).__name__, str(error)]
        return []

    updates = 0
    real = vars(sharded_instructions)["update_init"]

    def counting(*arguments: object) -> object:
        begin = real(*arguments)

        def counted() -> object:
            nonlocal updates
            updates += 1
            if updates == 3 and rank == 1:  # while it waits for the others
                threading.Timer(0.3, os.kill, (pid, signal.Signals[how])).start()
                Path(folder, how).touch()
            elif updates == 3:
                while not Path(folder, how).exists():  # it may be late by more than that
                    time.sleep(0.01)
                until_left(how, pids[1], Path(folder, "interrupted"))
                # Less patient than the leader, which takes the silent for lost.
                complete = lambda self, native, *_: patient(self, native, 0.5)  # noqa: E731
                mock.patch.object(NativeTransport, "complete", complete).start()
            return begin()

        return counted

    vars(sharded_instructions)["update_init"], patient = counting, NativeTransport.complete
    world = ar.init()
    rank, pid = world.rank, os.getpid()
    pids = [int(one) for one in world.all_gather(pid)]
    for how in ("SIGINT", "SIGSTOP", "SIGKILL"):
        updates = 0
        strategy = ar.MultiWorkerMirroredStrategy()
        with strategy.scope():
            w = ar.Variable(np.ones((256, 1024), "f4"), name="w")
            limit = 1.0 if clips else None
            optimizer = ar.optim.SGD(1e-3, momentum=0.5, clip_norm=limit)
        (batch,) = strategy.distribute_dataset([(np.ones((6, 256), "f4"),)])
        assert run() == run() == []
        assert updates == 2
        began = time.monotonic()
        found = [run(), run()]
        if rank == 1:
            Path(folder, "interrupted").touch()
        print(json.dumps([how, time.monotonic() - began, *found]), flush=True)
        mock.patch.stopall()
        if how == "SIGSTOP" and rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        strategy.close()


@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clipped"])
def test_whoever_leaves_an_update_is_named_and_the_next_step_knows_of_it(
    tmp_path: Path, clips: bool
) -> None:
    results = run_ranks(_fails_in_steps, 3, arguments=(str(tmp_path), clips))
    assert [result.returncode for result in results] == [0, -9, 0], results
    call = "update(float32[262144], sgd)"
    told = {
        "SIGINT": ("PeerLostError", "rank 1 aborted the communicator: a wait was interrupted"),
        "SIGSTOP": ("TimeoutError", "rank 1 "),
        "SIGKILL": ("PeerLostError", "rank 1 (process"),
    }
    for rank in (0, 2):
        lines = [json.loads(line) for line in results[rank].stdout.splitlines()]
        assert [line[0] for line in lines] == list(told)
        for how, seconds, (kind, text), (again, dead) in lines:
            assert kind == told[how][0], text
            assert told[how][1] in text
            assert call in text or how == "SIGINT", text
            assert again == "ClosedError"
            assert "rank 1" in dead
            assert seconds < 25
    (kind, _), (again, _) = json.loads(results[1].stdout.splitlines()[0])[2:]
    assert (kind, again) == ("KeyboardInterrupt", "ClosedError")
