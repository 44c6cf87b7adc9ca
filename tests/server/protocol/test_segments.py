"""Large arrays between tasks of one host go through shared memory, which is used again."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.server.protocol import segments
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.frames import Frame
from tests.server.clusters import serving
from tests.server.protocol.connected import Ends, connected

LARGE = segments.SMALLEST // 4  # elements


@pytest.fixture
def ends() -> Iterator[Ends]:
    with connected() as made:
        yield made


def test_arrays_of_all_sizes_arrive(ends: Ends) -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE):
        sent: list[np.ndarray] = [random.random((size, 1), np.float32), np.arange(size)]
        ends.send(*sent)
        for one, other in zip(ends.received.get(timeout=10), sent, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.shape == other.shape


def test_a_segment_is_used_again_when_its_array_is_gone(
    ends: Ends,
) -> None:
    numbers = set()
    for step in range(20):
        ends.send(np.full(LARGE, step, np.float32))
        part = ends.received.get(timeout=10)[0][3:5]  # a view keeps it
        assert part.tolist() == [step, step]
        numbers.add(ends.frames[-1].about.arrays[0].segment)
        if step == 10:
            kept = part
    assert len(numbers) <= 4  # the kept one, this step's, and what reading threads still hold
    assert 0 not in numbers
    assert kept.tolist() == [10, 10]


def test_arrays_that_are_kept_do_not_keep_others_from_coming(
    ends: Ends,
) -> None:
    kept = []
    for step in range(segments.MOST_SEGMENTS + 3):
        ends.send(np.full(LARGE, step, np.float32))
        kept.append(ends.received.get(timeout=10)[0])
    assert ends.frames[-1].about.arrays[0].segment == 0  # it came by the socket
    assert [int(each[-1]) for each in kept] == list(range(len(kept)))


def test_a_segment_that_was_never_sent_ends_the_connection(
    ends: Ends,
) -> None:
    about = pb.Description(arrays=[pb.Array(dtype="<f4", shape=[LARGE], segment=7)])
    ends.sender.send(Frame(pb.TENSOR, about))
    with pytest.raises(queue.Empty):
        ends.received.get(timeout=1)
    assert "segment 7, which is not there" in ends.receiver.ended


def test_a_larger_segment_takes_the_place_of_a_small_one(ends: Ends) -> None:
    for size in range(1, segments.MOST_SEGMENTS + 3):
        ends.send(np.full(size * LARGE, size, np.float32))
        assert ends.received.get(timeout=10)[0].tolist() == [size] * (size * LARGE)
    assert ends.frames[-1].about.arrays[0].segment > 0


def test_a_child_made_by_fork_frees_no_segment_of_its_parent(ends: Ends) -> None:
    ends.send(np.ones(LARGE, np.float32))
    kept = ends.received.get(timeout=10)[0]
    child = os.fork()
    if child == 0:
        del kept
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(segments.MOST_SEGMENTS):
        ends.send(np.full(LARGE, 2, np.float32))
        ends.received.get(timeout=10)
    assert set(kept.tolist()) == {1.0}


def test_operators_read_a_tensor_where_it_arrives_and_let_go_of_it_after_the_step() -> None:
    first, second = "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"

    def step(x: ar.Tensor) -> Any:
        with ar.device(first):
            large = ar.ops.broadcast_to(x, (LARGE,)) + 1.0
        with ar.device(second):
            return large, ar.ops.reshape(large, (2, -1))[1], ar.ops.relu(large) * 2.0

    with (
        serving(worker=2) as (sender, receiver),
        ar.Session(sender.target, timeout=20) as session,
    ):
        kept = []
        for i in range(segments.MOST_SEGMENTS + 3):
            kept.append(session.run(step, args=(np.full(1, i, np.float32),)))
        for i, (whole, half, doubled) in enumerate(kept):  # no later step has changed them
            np.testing.assert_array_equal(whole, np.full(LARGE, i + 1, np.float32))
            np.testing.assert_array_equal(half, np.full(LARGE // 2, i + 1, np.float32))
            np.testing.assert_array_equal(doubled, np.full(LARGE, 2 * (i + 1), np.float32))
        channel, _ = sender.connections.connect(receiver.task)
        assert 0 < len(channel._sent._segments) < segments.MOST_SEGMENTS  # free after each step
        (part,) = receiver.worker._parts.values()
        (bound,) = part.executor.bound_programs
        assert bound.frame.memory.nbytes < 4 * LARGE  # none is for the tensor
