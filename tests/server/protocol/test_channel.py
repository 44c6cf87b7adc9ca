"""Data connections: many arrays, half frames, busy readers and errors of their handlers."""

from __future__ import annotations

import fcntl
import queue
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from allreduce._native import FrameSocket
from allreduce.errors import PeerLostError, UnsupportedError
from allreduce.server.protocol import channel, frames, segments
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.channel import Channel
from tests.cluster.processes import running, wait_until
from tests.harness import ROOT
from tests.server.protocol.connected import connected


def test_a_frame_may_have_thousands_of_arrays() -> None:
    with connected() as ends:
        ends.send(*(np.full(3, i) for i in range(3000)))
        found = ends.received.get(timeout=25)
        assert [int(each[0]) for each in found] == list(range(3000))


def test_arrays_of_any_size_order_and_type_arrive_as_they_were() -> None:
    square = np.arange(35 * 35, dtype=np.float32).reshape(35, 35)
    given: list[np.ndarray] = [
        *(np.arange(n, dtype=np.uint8) for n in (0, 1, 1023, 65535, 65536, 65537, 200_000)),
        *(square.T, square[::2, ::3], np.asfortranarray(square), square.astype(">f8")),
        *(np.array(True), np.zeros((0, 3)), np.array(1 + 2j), np.ones(2, np.float16), square[:1]),
    ]
    orders = [given, given[::-1], given[9:], given[9:], [], given[:3], given[::3]]
    with connected() as ends:
        for arrays in orders:
            ends.send(*arrays)
            found = ends.received.get(timeout=25)
            assert [each.dtype for each in found] == [each.dtype for each in arrays]
            for each, sent in zip(found, arrays, strict=True):
                np.testing.assert_array_equal(each, sent)
                assert each.flags.writeable or each.nbytes >= segments.SMALLEST


def test_a_frame_that_comes_byte_by_byte_is_read() -> None:
    sent = np.arange(5, dtype=np.int32)
    announced = frames.announce(sent.dtype, sent.shape)
    head = FrameSocket.head(len(announced), pb.TENSOR, 0, 0)
    with connected() as ends:
        for byte in head + announced + sent.tobytes():
            ends.sender._socket.sendall(bytes([byte]))
            time.sleep(0.001)
        assert ends.received.get(timeout=25)[0].tolist() == [0, 1, 2, 3, 4]


def test_a_dtype_that_does_not_travel_is_refused_before_anything_is_sent() -> None:
    with connected() as ends:
        with pytest.raises(UnsupportedError, match="bfloat16 does not travel to b; cast it"):
            ends.send(np.zeros(3, ml_dtypes.bfloat16))
        ends.send(np.ones(3))
        assert ends.received.get(timeout=25)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("content", [b"\xff" * 40, b"\x0a"])
def test_bytes_that_are_no_frame_end_the_connection(content: bytes) -> None:
    with connected() as ends:
        ends.sender._socket.sendall(FrameSocket.head(len(content), pb.TENSOR, 0, 0) + content)
        assert ends.reasons.get(timeout=25)
        assert ends.receiver.ended
        with pytest.raises(queue.Empty):
            ends.received.get(timeout=0.2)


def test_an_error_of_what_handles_a_frame_ends_the_connection() -> None:
    def fail(_: object) -> None:
        raise MemoryError("none left")

    with connected(fail) as ends:
        ends.send(np.ones(3))
        assert ends.reasons.get(timeout=25)
        assert ends.receiver.ended == "MemoryError: none left"


def test_a_reader_that_is_busy_does_not_take_the_other_end_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(channel, "DEAD_SECONDS", 0.4)
    with connected(lambda _: time.sleep(1.5)) as ends:
        ends.send(np.ones(1))
        ends.send(np.ones(1))  # both readers are busy, and read no heartbeat
        time.sleep(1.2)
        assert not ends.receiver.ended


_SUSPENDED = """
import time
import numpy as np
from allreduce.server.protocol import channel
channel.BEAT_SECONDS, channel.DEAD_SECONDS = 0.1, 0.8
import allreduce as ar
from tests.server.clusters import serving

def step(x):
    return x + 1.0

with serving(worker=1) as (server,), ar.Session(server.target, timeout=60) as session:
    for _ in range(3):
        session.run(step, (np.ones(3),))
        (connection,) = session._requests._channels.values()
        print("ran", flush=True)
        time.sleep(0.3)
        assert not connection.ended, connection.ended
"""


def test_ends_that_are_suspended_together_do_not_take_each_other_for_dead() -> None:
    with running([sys.executable, "-c", _SUSPENDED], {"PYTHONPATH": str(ROOT)}) as process:
        for _ in range(3):
            assert process.line() == "ran"
            process.signal(signal.SIGSTOP)
            time.sleep(1.5)
            process.signal(signal.SIGCONT)
        result = process.finish(25)
    assert result.code == 0, result


def test_another_thread_reads_while_a_frame_that_was_handed_over_is_handled() -> None:
    threads: queue.Queue[int] = queue.Queue()
    is_last = threading.Event()

    def handle(arrays: Sequence[np.ndarray]) -> None:
        threads.put(threading.get_ident())
        if arrays[0] == 2:
            ends.receiver.hand_over()
            assert is_last.wait(25)
        elif arrays[0] == 3:
            is_last.set()

    with connected(handle) as ends:
        for i in range(4):
            ends.send(np.array(i))
        first, second, third, other = (threads.get(timeout=25) for _ in range(4))
        assert first == second == third != other


def test_an_end_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(channel, "DEAD_SECONDS", 0.4)

    lost: queue.Queue[str] = queue.Queue()

    def handle(*_: object) -> None: ...

    def lose(_: Channel, why: str) -> None:
        lost.put(why)

    for each in (handle, None):
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        made = Channel(ours, "b", each, lose)
        assert "has sent nothing for" in lost.get(timeout=25)
        assert made.ended
        theirs.close()


def _unread(sender: socket.socket) -> int:
    """Return how many bytes the other end has not read yet."""
    found = fcntl.ioctl(sender, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(found, sys.byteorder)


@pytest.mark.parametrize("sent", [10, 25, 100])  # in the head, the description and the array
@pytest.mark.parametrize("in_main_thread", [True, False])  # the kernel may interrupt any thread
def test_an_interrupt_in_the_middle_of_an_answer_ends_a_clients_connection(
    sent: int, in_main_thread: bool
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    client = Channel(ours, "b", None, lambda *_: None)
    answer = client.request(frames.Frame(pb.READ))
    announced = frames.announce(np.dtype(np.float32), (1000,))
    content = FrameSocket.head(len(announced), pb.DONE, 1, 0) + announced + b"half of it"
    theirs.sendall(content[:sent])

    def interrupt() -> None:
        wait_until(lambda: not _unread(theirs))  # it reads, and waits for the rest
        target = threading.main_thread().ident if in_main_thread else threading.get_ident()
        assert target is not None
        signal.pthread_kill(target, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        client.wait(answer, 60)
    assert "KeyboardInterrupt" in client.ended
    assert "KeyboardInterrupt" in answer.lost
    with pytest.raises(PeerLostError):
        client.send(frames.Frame(pb.READ))
    theirs.close()
