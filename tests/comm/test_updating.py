"""Updates where gradients are added up: every member changes its own slice, for all members."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import _native
from allreduce.comm import Communicator, replica_communicators, updating
from allreduce.errors import MismatchError
from tests.harness import world_of_one

COUNT, HEADER = 100_003, 16


class Side:
    """What one member has: gradients of ones behind a header, values of zeros, a velocity."""

    def __init__(self, comm: Communicator) -> None:
        made = comm.empty((HEADER + COUNT,), "float32")
        made[:HEADER], made[HEADER:] = 2, 1
        self.header, self.gradients = made[:HEADER], made[HEADER:]
        self.values = comm.empty((COUNT,), "float32")
        self.values[:] = 0
        self.velocity = np.zeros(COUNT, np.float32)
        comm.barrier()

    def momentum(self) -> Any:
        update = _native.sgd_update(self.header, self.velocity)
        update.set(0.5, 0.9, False)
        update.expect(b"", False)
        return update

    def adam(self) -> Any:
        update = _native.adam_update(self.header, self.velocity, np.zeros(COUNT, np.float32))
        update.set(0.1, 0.9, 0.999, 1e-7, 1)
        update.expect(b"", False)
        return update


def _on_two(name: str, act: Callable[[Communicator], Any]) -> list[Any]:
    """Let two members of this process act, each in a thread; an error is what it returns."""
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
        start = updating.update_init(comm, side.gradients, side.values, update, side.velocity)
        start().wait()
        comm.barrier()
        return [float(each) for each in np.unique(side.values)]

    # The mean of two gradients of 1 over 2 samples is 1.
    assert _on_two("updating", act) == [[-0.5], [-0.5]]


def test_what_a_dropped_work_needs_lives_until_it_is_done() -> None:
    def act(comm: Communicator) -> list[float]:
        side = Side(comm)
        if comm.rank == 1:
            time.sleep(0.3)  # the other one's call waits
        start = updating.update_init(
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
        updating.update_init(comm, side.gradients, side.values, update, side.velocity)().wait()

    for error in _on_two("rules", act):
        assert isinstance(error, MismatchError)
        assert "SgdUpdate32" in str(error)
        assert "AdamUpdate32" in str(error)


def test_a_header_has_what_is_expected_of_it() -> None:
    header = np.zeros(2, np.float32)
    update = _native.sgd_update(header, np.zeros(3, np.float32))
    update.expect(bytes(4), False)
    with pytest.raises(ValueError, match="more bytes than the header has"):
        update.expect(bytes(5), False)
