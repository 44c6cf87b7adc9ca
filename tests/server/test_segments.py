"""Large arrays between tasks of one host go through shared memory, which is used again."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from allreduce.server import segments
from allreduce.server import task_pb2 as pb
from allreduce.server.channel import Channel

LARGE = segments.SMALLEST // 4  # elements

Received = queue.Queue[Sequence[np.ndarray]]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel, Received]]:
    """Give a connection's two ends, and what the second one receives."""
    first, second = socket.socketpair(socket.AF_UNIX)
    received: Received = queue.Queue()
    sender = Channel(first, "b", lambda *_: None, lambda *_: None)
    receiver = Channel(second, "a", lambda _, __, arrays: received.put(arrays), lambda *_: None)
    yield sender, receiver, received
    sender.leave()
    receiver.leave()


def _send(sender: Channel, *arrays: np.ndarray) -> pb.Frame:
    frame = pb.Frame(kind=pb.Frame.TENSOR)
    sender.send(frame, arrays)
    return frame


def test_arrays_of_all_sizes_arrive(ends: tuple[Channel, Channel, Received]) -> None:
    sender, _, received = ends
    random = np.random.default_rng(0)
    for size in (0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE):
        sent: list[np.ndarray] = [random.random((size, 1), np.float32), np.arange(size)]
        _send(sender, *sent)
        for one, other in zip(received.get(timeout=10), sent, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.shape == other.shape


def test_a_segment_is_used_again_when_its_array_is_gone(
    ends: tuple[Channel, Channel, Received],
) -> None:
    sender, _, received = ends
    numbers = set()
    for step in range(20):
        frame = _send(sender, np.full(LARGE, step, np.float32))
        part = received.get(timeout=10)[0][3:5]  # a view keeps it
        assert part.tolist() == [step, step]
        numbers.add(frame.arrays[0].segment)
        if step == 10:
            kept = part
    assert len(numbers) <= 4  # the kept one, this step's, and what reading threads still hold
    assert 0 not in numbers
    assert kept.tolist() == [10, 10]


def test_arrays_that_are_kept_do_not_keep_others_from_coming(
    ends: tuple[Channel, Channel, Received],
) -> None:
    sender, _, received = ends
    kept = []
    for step in range(segments.MOST_SEGMENTS + 3):
        frame = _send(sender, np.full(LARGE, step, np.float32))
        kept.append(received.get(timeout=10)[0])
    assert frame.arrays[0].segment == 0  # it came by the socket
    assert [int(each[-1]) for each in kept] == list(range(len(kept)))


def test_a_segment_that_was_never_sent_ends_the_connection(
    ends: tuple[Channel, Channel, Received],
) -> None:
    sender, receiver, received = ends
    frame = pb.Frame(kind=pb.Frame.TENSOR)
    frame.arrays.add(dtype="<f4", shape=[LARGE], segment=7)
    sender.send(frame)
    with pytest.raises(queue.Empty):
        received.get(timeout=1)
    assert "segment 7, which is not there" in receiver.ended
