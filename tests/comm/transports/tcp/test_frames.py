"""Invalid frames: a member reports that its peer is lost, and nothing else happens.

This test plays the peer of a real member, and writes valid and broken frames to its sockets.
"""

from __future__ import annotations

import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from allreduce import _native, errors
from allreduce.comm.calls.call import DTYPES, PATHS, Array, Call
from allreduce.comm.selection.choosing import choices_for
from allreduce.comm.transports.tcp import calls as tcp_calls
from allreduce.comm.transports.tcp.failures import TcpMemberInfo
from allreduce.comm.transports.tcp.transport import TcpTransport

HEADER = struct.Struct("<IBBHQQII")
MAGIC = 0x52415031
POST, MESSAGE, OFFER, ACCEPT, CREDIT, FAULT, GOODBYE, DATA, WAITS = range(1, 10)
COUNT, HALF = 4096, 2048
GUARD = 512
CALL = Call("all_reduce", "sum", "float32", COUNT, None, "frames")


def signed(call: Call) -> bytes:
    return tcp_calls.annotated(tcp_calls.encode(call, "here"), b"(8) a.py:3")


SIGNATURE = signed(CALL)
CHOICES = choices_for("tcp", 2)
# all_reduce along the ring: sum of float32, in chunks of 256 KiB
CHAIN = ((1, 1, 1, 0, COUNT, None, None), PATHS.index("chain"), 0, 1 << 18)


@dataclass
class Peer:
    """A played member 1: its sockets for control and data, and the real member 0."""

    member: _native.TcpMember
    words: socket.socket
    data: socket.socket

    def send(self, frames: list[tuple[int, bytes]]) -> None:
        """Send (channel, frame) one after the other; a member that has hung up is fine."""
        for channel, frame in frames:
            try:
                (self.data if channel else self.words).sendall(frame)
            except OSError:
                return


@contextmanager
def peer() -> Iterator[Peer]:
    pairs = [socket.socketpair() for _ in range(3)]
    sockets = [mine.detach() for mine, _ in pairs]
    member = _native.TcpMember(0, [[], sockets])
    with pairs[0][1] as words, pairs[1][1], pairs[2][1] as data:
        for sock in (words, data):
            sock.settimeout(2)
        yield Peer(member, words, data)
    assert member.leave(2).wait(25)


def frame(
    kind: int, key: int, offset: int = 0, stage: int = 0, payload: bytes = b"", signature: int = 0
) -> bytes:
    return HEADER.pack(MAGIC, kind, 0, signature, key, offset, stage, len(payload)) + payload


def good() -> list[tuple[int, bytes]]:
    """Member 1's part of the first all_reduce, of ones: its post, its contribution, its result."""
    ones = np.ones(HALF, "float32")
    return [
        (0, frame(POST, 0, payload=SIGNATURE, signature=len(SIGNATURE))),
        (1, frame(DATA, 0, stage=0, payload=ones.tobytes())),
        (1, frame(DATA, 0, stage=3, payload=(ones * 2).tobytes())),
    ]


def begin(peer: Peer) -> tuple[_native.TcpWork, Array, Array]:
    """Start the call on member 0; returns the work, its input, and its output between guards."""
    x, guarded = np.ones(COUNT, "float32"), np.full(COUNT + 2 * GUARD, 77, "float32")
    at = guarded.ctypes.data + GUARD * 4
    work = peer.member.start(CHAIN, SIGNATURE, x.ctypes.data, at)
    post = HEADER.size + len(SIGNATURE)
    assert len(peer.words.recv(post, socket.MSG_WAITALL)) == post  # data comes only after it
    return work, x, guarded


def test_the_frames_of_this_test_are_those_of_a_member() -> None:
    with peer() as other:
        work, _, guarded = begin(other)
        other.send(good())
        assert work.wait(25)
        assert (guarded[GUARD:-GUARD] == 2).all()
        assert (guarded[:GUARD] == 77).all()
        assert (guarded[-GUARD:] == 77).all()


@pytest.mark.parametrize(
    "bad",
    [
        (1, frame(DATA, 0, stage=9, payload=bytes(8))),
        (1, frame(DATA, 0, stage=0, payload=bytes(4 * HALF + 4))),
        (1, frame(DATA, 0, offset=1, stage=0, payload=bytes(4 * HALF))),
        (1, frame(DATA, 0, offset=1 << 63, stage=0, payload=bytes(4 * HALF))),
        (1, frame(DATA, 5, stage=0, payload=bytes(4 * HALF))),
        (1, frame(POST, 1, payload=b"no data")),
        (1, b"GET / HTTP/1.0\r\n\r\n" + bytes(32)),
        (0, frame(DATA, 0, stage=0, payload=bytes(4 * HALF))),
        (0, frame(POST, 0, payload=SIGNATURE, signature=len(SIGNATURE) + 1)),
        (0, frame(POST, 1 << 40, payload=SIGNATURE, signature=len(SIGNATURE))),
        (0, HEADER.pack(MAGIC, POST, 0, 4, 1, 0, 0, 0xFFFFFFFF)),
        (0, frame(MESSAGE, 1 << 63, stage=1, payload=struct.pack("<Q", 1 << 62))),
        (0, frame(OFFER, 1 << 63, stage=1, payload=struct.pack("<Qd", 1, 0))),
        (0, frame(ACCEPT, 7, offset=9)),
        (0, frame(ACCEPT, 7)),
        (0, frame(CREDIT, 0, offset=9, stage=77)),
        (0, frame(FAULT, 0, offset=2 | 99 << 8, payload=bytes(12))),
        (0, frame(FAULT, 0, offset=2, payload=b"\xff" * 12)),
        (0, frame(99, 0)),
    ],
)
def test_a_peer_that_talks_nonsense_counts_as_lost(bad: tuple[int, bytes]) -> None:
    with peer() as other:
        work, _, guarded = begin(other)
        other.send([bad])
        assert not work.wait(25)
        assert work.failed
        found = other.member.culprit()
        assert found is not None
        assert found[:2] == ("lost", 1)
        assert (guarded == 77).all()


def test_who_sends_more_small_messages_than_are_received_breaks_the_protocol() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    members = tuple(TcpMemberInfo(i, i, i, False, "here", near=True) for i in range(2))
    sockets = [[], [mine.detach() for mine, _ in pairs]]
    transport = TcpTransport(0, sockets, members, "frames", 25, CHOICES)
    words = pairs[0][1]
    payload = signed(CALL) + struct.pack("<Qq", 1, 5)
    message = frame(
        MESSAGE, 1 << 63, stage=DTYPES.index("int64"), payload=payload, signature=len(signed(CALL))
    )
    with words, pairs[1][1], pairs[2][1]:
        words.sendall(message * 64)  # as many as its peer takes
        out = np.zeros(1, "int64")
        call = Call("recv", None, "int64", 1, 1, "frames", tag=-1)
        transport.start(call, None, out, lambda: None).wait()
        assert out == 5
        words.sendall(message)
        time.sleep(0.1)
        transport.check_alive()
        words.sendall(message)
        deadline = time.monotonic() + 25
        while not transport.dead and time.monotonic() < deadline:
            time.sleep(0.01)
        said = "rank 1 (process 1) broke the protocol: it sent more than 64 small messages"
        with pytest.raises(errors.PeerLostError, match=re.escape(said)):
            transport.check_alive()
        transport.close(drain=False)


def test_the_same_chunk_twice_is_nonsense() -> None:
    with peer() as other:
        work, _, _ = begin(other)
        other.send([*good()[:2], good()[1]])
        assert not work.wait(25)
        assert work.failed


def scrambled(draw: random.Random) -> list[tuple[int, bytes]]:
    """Frames of a good call: changed, left out, doubled, cut short, or mixed with any others."""
    frames = good()
    for _ in range(draw.randint(1, 3)):
        index = draw.randrange(len(frames))
        channel, text = frames[index]
        match draw.randrange(5):
            case 0:
                changed = bytearray(text or b"?")
                changed[draw.randrange(min(len(text), 80) or 1)] ^= 1 << draw.randrange(8)
                frames[index] = channel, bytes(changed)
            case 1:
                frames.insert(draw.randrange(len(frames)), frames[index])
            case 2:
                frames[index] = channel, text[: draw.randrange(len(text) or 1)]
            case 3:
                frames[index] = draw.randrange(2), text
            case _:
                frames.insert(index, (draw.randrange(2), anything(draw)))
    return frames


def anything(draw: random.Random) -> bytes:
    numbers = [0, 1, 2, 3, 1 << 63, draw.getrandbits(64)]
    return frame(
        draw.randrange(12),
        draw.choice(numbers),
        draw.choice(numbers),
        draw.choice([0, 1, 3, 15, draw.getrandbits(32)]),
        draw.randbytes(draw.choice([0, 8, 16, 100])),
        draw.choice([0, 4, 8]),
    )


def fuzz(seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    for _ in range(rounds):
        with peer() as other:
            work, x, guarded = begin(other)
            receive = np.full(GUARD, 77, "int64")
            call = Call("recv", None, "int64", 1, -1, "frames", tag=-1)
            words, signature = tcp_calls.words(call, 2, CHOICES), signed(call)
            message = other.member.start(words, signature, 0, receive.ctypes.data)
            other.send(scrambled(draw))
            other.member.abort("enough")
            for one in (work, message):
                one.wait(25)
                assert one.done or one.failed
            assert (guarded[:GUARD] == 77).all()
            assert (guarded[-GUARD:] == 77).all()
            assert (receive[1:] == 77).all()
            assert (x == 1).all()


def test_scrambled_frames() -> None:
    fuzz(20262, 300)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_scrambled_frames_for_long() -> None:
    fuzz(20263, 105_000)  # the change of one in thirty changes nothing


def test_last_words_reach_a_peer_that_speaks_when_another_one_dies() -> None:
    for _ in range(200):
        pairs = [[socket.socketpair() for _ in range(3)] for _ in range(2)]
        sockets = [[mine.detach() for mine, _ in channels] for channels in pairs]
        member = _native.TcpMember(0, [[], *sockets])
        dying, speaking = ([theirs for _, theirs in channels] for channels in pairs)
        post = frame(POST, 0, payload=SIGNATURE, signature=len(SIGNATURE))
        for sock in dying:
            sock.close()
        speaking[0].sendall(post)
        speaking[0].settimeout(5)
        header = HEADER.unpack(speaking[0].recv(HEADER.size, socket.MSG_WAITALL))
        assert header[1] == FAULT
        assert header[5] >> 8 & 0xFFFFFF == 1  # the culprit
        for sock in speaking:
            sock.close()
        assert member.leave(2).wait(25)
