"""Large arrays between tasks of one host go through shared memory, which is used again."""

from __future__ import annotations

import os
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
        for one, other in zip(ends.received.get(timeout=25), sent, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.shape == other.shape


def test_a_segment_is_used_again_when_its_array_is_gone(
    ends: Ends,
) -> None:
    numbers = set()
    for step in range(20):
        ends.send(np.full(LARGE, step, np.float32))
        part = ends.received.get(timeout=25)[0][3:5]  # a view keeps it
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
        kept.append(ends.received.get(timeout=25)[0])
    assert ends.frames[-1].about.arrays[0].segment == 0  # it came by the socket
    assert [int(each[-1]) for each in kept] == list(range(len(kept)))


def test_a_segment_that_was_never_sent_ends_the_connection(
    ends: Ends,
) -> None:
    about = pb.Description(arrays=[pb.Array(dtype="<f4", shape=[LARGE], segment=7)])
    ends.sender.send(Frame(pb.TENSOR, about))
    assert "segment 7, which is not there" in ends.reasons.get(timeout=25)
    assert ends.received.empty()


def test_a_larger_segment_takes_the_place_of_a_small_one(ends: Ends) -> None:
    for size in range(1, segments.MOST_SEGMENTS + 3):
        ends.send(np.full(size * LARGE, size, np.float32))
        assert ends.received.get(timeout=25)[0].tolist() == [size] * (size * LARGE)
    assert ends.frames[-1].about.arrays[0].segment > 0


def test_an_array_that_is_computed_in_a_segment_is_not_copied(ends: Ends) -> None:
    numbers = set()
    for step in range(6):
        reserved = ends.sender.reserve(4 * LARGE)
        assert reserved is not None
        array = reserved.view(np.float32).reshape(2, -1)
        array[...] = step
        ends.send(array)
        found = ends.received.get(timeout=25)[0]
        array[0, 0] = -1.0  # both ends have the same memory
        assert found[0, 0] == -1.0
        assert found[1].tolist() == [step] * (LARGE // 2)
        numbers.add(ends.frames[-1].about.arrays[0].segment)
        del found
        other = ends.sender.reserve(4 * LARGE)  # while this end still reads the first
        assert other is not None
        assert not np.may_share_memory(other, array)
        del reserved, array, other
    assert len(numbers) <= 4


def test_a_segment_that_was_reserved_for_nothing_serves_other_arrays(ends: Ends) -> None:
    ends.sender.reserve(4 * LARGE)
    taken = [ends.sender.reserve(4 * LARGE) for _ in range(segments.MOST_SEGMENTS)]
    assert 0 < sum(each is not None for each in taken) < segments.MOST_SEGMENTS
    for reserved in (taken, []):
        ends.send(np.full(LARGE, 3, np.float32))
        assert ends.received.get(timeout=25)[0].tolist() == [3] * LARGE
        assert ends.frames[-1].about.arrays[0].segment > 0
        reserved.clear()
    assert ends.sender.reserve(4 * LARGE) is not None


def test_a_child_made_by_fork_frees_no_segment_of_its_parent(ends: Ends) -> None:
    ends.send(np.ones(LARGE, np.float32))
    kept = ends.received.get(timeout=25)[0]
    child = os.fork()
    if child == 0:
        del kept
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(segments.MOST_SEGMENTS):
        ends.send(np.full(LARGE, 2, np.float32))
        ends.received.get(timeout=25)
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
        for task in (sender, receiver):
            (part,) = task.worker._parts.values()
            (bound,) = part.executor.bound_programs
            assert bound.frame.memory.nbytes < 4 * LARGE  # none is for the tensor


def test_a_tensor_that_is_sent_is_also_read_where_it_was_computed() -> None:
    first, second = "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"

    def step(x: ar.Tensor) -> Any:
        with ar.device(first):
            large = ar.ops.relu((ar.ops.broadcast_to(x, (LARGE,)) + 1.0) * 2.0)
        with ar.device(second):
            there = large * 3.0
        with ar.device(first):
            return large + 1.0, ar.ops.sum(large), large, there + large

    with (
        serving(worker=2) as (sender, _),
        ar.Session(sender.target, timeout=20) as session,
        ar.Session(sender.target, timeout=20) as another,
    ):
        kept = []
        for i in range(2 * segments.MOST_SEGMENTS):
            value = np.full(1, i, np.float32)
            kept.append((i, (session, another)[i % 2].run(step, args=(value,))))
        for i, (more, total, large, both) in kept:
            expected = 2.0 * (i + 1)
            np.testing.assert_array_equal(more, np.full(LARGE, expected + 1, np.float32))
            assert float(total) == expected * LARGE
            np.testing.assert_array_equal(large, np.full(LARGE, expected, np.float32))
            np.testing.assert_array_equal(both, np.full(LARGE, 4 * expected, np.float32))


def test_what_a_step_receives_and_changes_in_place_is_sent_on() -> None:
    places = [f"/job:worker/task:{i}/cpu:0" for i in range(3)]

    def step(x: ar.Tensor) -> Any:
        for place in (*places, *places):
            with ar.device(place):
                x = ar.ops.tanh(ar.ops.relu(x + 1.0) * 0.25)
        return x

    x = np.linspace(-2, 2, LARGE, dtype=np.float32)
    with serving(worker=3) as servers, ar.Session(servers[0].target, timeout=20) as session:
        for i in range(5):
            expected = x * i
            for _ in range(6):
                expected = np.tanh(np.maximum(expected + 1, 0) * np.float32(0.25))
            found = session.run(step, args=(x * i,))
            np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)
