"""A store updates as the optimizer does on one process, whatever comes twice or late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import ShapeError, UnsupportedError
from allreduce.parameters.arena_store import ArenaStore
from allreduce.parameters.partition import cut
from allreduce.reduction import lay_out

LAYOUT = lay_out([("kernel", (5, 3)), ("bias", (3,))], "float32")


def store(optimizer: Any, servers: int = 1) -> ArenaStore:
    made = ArenaStore(cut(LAYOUT, servers)[0], optimizer, "float32", servers)
    made.set(np.ones(made.part.size, np.float32), {})
    return made


def test_gradients_are_divided_by_their_samples_and_staleness_is_counted() -> None:
    made = store(ar.optim.SGD(0.5))
    gradients = np.full(made.part.size, 4.0, np.float32)
    assert made.push(gradients.copy(), 4.0, 0, "a", 1) == 0
    assert made.push(gradients.copy(), 8.0, 0, "b", 1) == 1
    np.testing.assert_array_equal(made.parameters, np.full(made.part.size, 0.25, np.float32))
    assert made.version == 2
    assert made.staleness == {0: 1, 1: 1}


def test_a_repeated_gradient_counts_once() -> None:
    made = store(ar.optim.SGD(1.0))
    for _ in range(2):
        made.push(np.ones(made.part.size, np.float32), 1.0, 0, "a", 1)
    assert made.version == 1
    assert not made.parameters.any()


def test_shares_of_a_synchronous_update_add_up() -> None:
    together, apart = store(ar.optim.Adam(0.1)), store(ar.optim.Adam(0.1))
    random = np.random.default_rng(0)
    for update in range(3):
        parts = random.standard_normal((2, together.part.size)).astype(np.float32)
        together.push(parts.sum(axis=0), 5.0, update)
        apart.contribute(parts[1], 3.0, update, share=1, of=2)
        apart.contribute(parts[1], 3.0, update, share=1, of=2)  # again, by another worker
        assert apart.version == update
        apart.contribute(parts[0], 2.0, update, share=0, of=2)
        apart.contribute(parts[0], 2.0, update, share=0, of=2)  # too late
    np.testing.assert_array_equal(apart.parameters, together.parameters)


def test_shares_that_lost_others_with_a_restart_are_dropped() -> None:
    made = store(ar.optim.SGD(1.0))
    gradients = np.ones(made.part.size, np.float32)
    made.contribute(gradients, 1.0, update=7, share=0, of=2)  # the other one went elsewhere
    made.contribute(gradients, 1.0, update=8, share=0, of=1)
    assert made.version == 1


def test_a_share_of_an_update_that_others_have_left_is_dropped() -> None:
    made = store(ar.optim.SGD(1.0))
    gradients = np.ones(made.part.size, np.float32)
    made.contribute(gradients, 1.0, update=20, share=0, of=2)  # the first server has restarted
    made.contribute(5.0 * gradients, 1.0, update=8, share=1, of=2)  # of a worker that was stopped
    made.contribute(gradients, 1.0, update=20, share=1, of=2)
    assert made.version == 1
    np.testing.assert_array_equal(made.parameters, 0.0)


@pytest.mark.parametrize("gradient", [8.0, 1e20])  # whose square is more than float32 holds
def test_the_norm_of_a_synchronous_update_is_clipped_on_one_server_only(gradient: float) -> None:
    made = store(ar.optim.SGD(1.0, clip_norm=1.0))
    before = made.parameters.copy()
    made.contribute(np.full(made.part.size, gradient, np.float32), 2.0, 0, share=0, of=1)
    assert np.linalg.norm(before - made.parameters) == pytest.approx(1.0)
    several = store(ar.optim.SGD(1.0, clip_norm=1.0), servers=2)
    with pytest.raises(UnsupportedError, match="use one server, or clip_value"):
        several.contribute(np.ones(several.part.size, np.float32), 1.0, 0, share=0, of=1)


def test_new_settings_keep_slots_and_count() -> None:
    made = store(ar.optim.SGD(1.0, momentum=0.5))
    gradients = np.ones(made.part.size, np.float32)
    made.push(gradients.copy(), 1.0, 0)
    made.configure(ar.optim.SGD(0.0, momentum=0.5))
    made.push(gradients.copy(), 1.0, 1)
    np.testing.assert_array_equal(made.parameters, -0.5)
    assert made.version == 2


def test_gradients_of_another_program_are_refused() -> None:
    with pytest.raises(ShapeError, match="run the same program on all workers"):
        store(ar.optim.SGD(1.0)).push(np.ones(3, np.float32), 1.0, 0)
