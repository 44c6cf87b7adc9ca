"""Calls that all members have begun over tcp complete, although a later one has failed."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from allreduce import _native, errors
from allreduce.comm import Communicator
from allreduce.comm.calls.call import COLLECTIVES
from tests.comm.ranks.hosts import lay_out
from tests.comm.transports.tcp import test_frames as frames
from tests.comm.transports.tcp.test_frames import (
    DATA,
    FAULT,
    GOODBYE,
    POST,
    SIGNATURE,
    WAITS,
    frame,
)
from tests.comm.transports.tcp.test_members import words_of
from tests.harness import run_threads

# A broadcast from member 1, one chunk, and a barrier: each member needs only its own part.
BROADCAST = ((COLLECTIVES.index("broadcast"), 0, 1, 1, frames.COUNT, None, None), 1, 0, 1 << 18)
BARRIER = ((COLLECTIVES.index("barrier"), 0, 0, 0, 0, None, None), 0, 0, 1 << 18)
OTHER = SIGNATURE.replace(b"all_reduce", b"barrierish")


class Three:
    """Member 0, in a broadcast that all have begun, and in the next call; the others are played."""

    def __init__(self, channels: list[list[socket.socket]]) -> None:
        self.channels = channels
        self.out = np.zeros(frames.COUNT, "float32")

    def begin(self, member: _native.TcpMember) -> None:
        self.member = member
        self.first = member.start(BROADCAST, SIGNATURE, 0, self.out.ctypes.data)
        self.second = member.start(BARRIER, SIGNATURE, 0, 0)
        for words, *_ in self.channels:
            assert words_of(words, POST) + words_of(words, POST) == [(POST, 0)] * 2
            words.sendall(post(0, SIGNATURE))

    def send_data(self) -> None:
        data = np.ones(frames.COUNT, "float32").tobytes()
        self.channels[0][2].sendall(frame(DATA, 0, payload=data))

    def hang_up(self, member: int) -> None:
        for sock in self.channels[member - 1]:
            sock.close()


def post(key: int, signature: bytes) -> bytes:
    return frame(POST, key, payload=signature, signature=len(signature))


@contextmanager
def three() -> Iterator[Three]:
    pairs = [[socket.socketpair() for _ in range(3)] for _ in range(2)]
    made = Three([[theirs for _, theirs in channels] for channels in pairs])
    made.begin(_native.TcpMember(0, [[], *([mine.detach() for mine, _ in one] for one in pairs)]))
    yield made
    for index in (1, 2):
        made.hang_up(index)
    assert made.member.leave(1).wait(25)


def ended(member: _native.TcpMember) -> str | None:
    found = member.culprit()
    return None if found is None else found[0]


def test_a_mismatch_lets_an_earlier_call_complete() -> None:
    with three() as played:
        for words, *_ in played.channels:
            words.sendall(post(1, OTHER))
        assert not played.first.wait(0.4)
        assert ended(played.member) is None
        played.send_data()
        assert played.first.wait(25)
        assert (played.out == 1).all()
        assert not played.second.wait(25)
        assert ended(played.member) == "mismatch"


def test_a_mismatch_that_another_tells_lets_an_earlier_call_complete() -> None:
    with three() as played:
        fault = frame(FAULT, 1, offset=1 | 2 << 8 | 2 << 32, payload=struct.pack("<3I", 0, 0, 0))
        played.channels[1][0].sendall(fault)
        played.hang_up(2)  # it had the result
        assert not played.first.wait(0.4)
        played.send_data()
        assert played.first.wait(25)
        assert not played.second.wait(25)
        assert ended(played.member) == "mismatch"


@pytest.mark.parametrize("begun", [True, False])
def test_a_mismatch_does_not_wait_for_a_call_that_cannot_complete(begun: bool) -> None:
    with three() as played:
        began = time.monotonic()
        if not begun:
            played.member.start(BARRIER, SIGNATURE, 0, 0)  # the third; nobody else makes the second
        key = 1 if begun else 2
        fault = frame(FAULT, key, offset=1 | 2 << 8 | 2 << 32, payload=struct.pack("<3I", 0, 0, 0))
        played.channels[1][0].sendall(fault)
        if begun:
            played.channels[1][0].sendall(frame(WAITS, 0, stage=1))
            while played.member.awaited(2) != 1 and time.monotonic() < began + 25:
                time.sleep(0.01)  # the fault has been read, too
            played.hang_up(1)  # without its data
        else:
            played.send_data()
        last = played.first if begun else played.second
        assert not last.wait(25)
        assert last.failed
        assert ended(played.member) == "mismatch"


@pytest.mark.parametrize("fault", [4, 5])  # an abort, a timeout
def test_a_member_that_gives_up_an_earlier_call_ends_it_for_all(fault: int) -> None:
    with three() as played:
        for words, *_ in played.channels:
            words.sendall(post(1, OTHER))
        assert not played.first.wait(0.2)
        told = frame(FAULT, 0, offset=fault | 1 << 8 | 1 << 32, payload=struct.pack("<3I", 0, 0, 0))
        played.channels[0][0].sendall(told)
        assert not played.first.wait(25)
        assert played.first.failed
        assert ended(played.member) == "mismatch"


def test_one_that_has_left_lets_an_earlier_call_complete() -> None:
    with three() as played:
        played.channels[1][0].sendall(frame(GOODBYE, 1))
        played.hang_up(2)
        assert not played.first.wait(0.4)
        played.send_data()
        assert played.first.wait(25)
        assert not played.second.wait(25)
        assert ended(played.member) == "left"


@pytest.mark.parametrize("hosts", ["", "abc", "aab"])
def test_all_have_the_result_before_the_mismatch(
    hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")
    if hosts:
        lay_out(monkeypatch, hosts)

    def member(comm: Communicator) -> None:
        x = np.ones(1 << 22, "float32")
        odd = np.ones(5 + (comm.rank == 2))
        first, second = (comm.all_reduce(each, async_op=True) for each in (x, odd))
        assert (first.wait() == 3).all()
        with pytest.raises(errors.MismatchError, match="call #1 differs"):
            second.wait()

    for _ in range(3):
        run_threads(member, 3)
