"""What goes on of started calls while their member waits for none of them."""

from __future__ import annotations

import numpy as np

from allreduce.comm import engine, replica_communicators
from tests.harness import world_of_one


def test_a_look_takes_all_steps_that_can_be_taken() -> None:
    comms = replica_communicators(world_of_one(), 2, name="engine", timeout=10)
    works = [comm.all_reduce(np.ones(2_000_000, "f4"), async_op=True) for comm in comms]
    looks = 0
    while not all(work.settled for work in works):  # which takes hundreds of steps
        engine.go_on()
        looks += 1
        assert looks <= 50
    assert all((work.wait() == 2).all() for work in works)
    for comm in comms:
        comm.close()
