"""One member of tcp among peers played by this test: its end, and shortages."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from allreduce import _native
from allreduce.comm.calls.call import COLLECTIVES, PATHS, Call
from allreduce.comm.selection.choosing import choices_for
from allreduce.comm.transports.tcp import calls as tcp_calls
from tests.comm.transports.tcp.test_frames import (
    ACCEPT,
    CHAIN,
    COUNT,
    DATA,
    FAULT,
    GOODBYE,
    HEADER,
    MESSAGE,
    OFFER,
    POST,
    SIGNATURE,
    Peer,
    frame,
    peer,
)
from tests.harness import clean_environment, run_commands, script_of

CHOICES = choices_for("tcp", 2)
BARRIER = Call("barrier", None, "none", 0, None, "members")
FIRST = 1 << 63  # the key of a member's first message
LONG = 100_000  # elements of a message that is offered


def signed(call: Call) -> bytes:
    return tcp_calls.annotated(tcp_calls.encode(call, "here"), b"")


def start(
    member: _native.TcpMember, call: Call, x: int = 0, out: int = 0, size: int = 2
) -> _native.TcpWork:
    return member.start(tcp_calls.words(call, size, CHOICES), signed(call), x, out)


def receive(
    member: _native.TcpMember, out: np.ndarray[tuple[int], np.dtype[np.float32]], source: int = 1
) -> _native.TcpWork:
    call = Call("recv", None, "float32", out.size, source, "members", tag=-1)
    return start(member, call, out=out.ctypes.data)


def offer(tag: int = 5) -> bytes:
    count = struct.pack("<Q", LONG)
    return frame(OFFER, FIRST, offset=tag, stage=1, payload=b"\2\0\0" + count, signature=3)


def words_of(sock: socket.socket, until: int) -> list[tuple[int, int]]:
    """Read frames up to one of a kind, or to the end; returns each frame's kind and offset."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(ConnectionError):
        while not found or found[-1][0] != until:
            header = sock.recv(HEADER.size, socket.MSG_WAITALL)
            if len(header) < HEADER.size:
                break
            _, kind, _, _, _, offset, _, length = HEADER.unpack(header)
            if length:
                sock.recv(length, socket.MSG_WAITALL)
            found.append((kind, offset))
    return found


def settled(work: _native.TcpWork) -> bool:
    work.wait(25)
    return work.done or work.failed


@contextlib.contextmanager
def two() -> Iterator[tuple[_native.TcpMember, _native.TcpMember]]:
    """Connect two real members."""
    pairs = [socket.socketpair() for _ in range(3)]
    first = _native.TcpMember(0, [[], [one.detach() for one, _ in pairs]])
    second = _native.TcpMember(1, [[one.detach() for _, one in pairs], []])
    yield first, second
    for member in (first, second):
        assert member.leave(2).wait(25)


def test_the_sender_of_a_message_that_does_not_fit_is_told() -> None:
    with peer() as other:
        out = np.zeros(1, "float32")
        work = receive(other.member, out)
        assert other.member.culprit() is None  # asked after it has begun to wait
        payload = b"\2\0\0" + struct.pack("<Qq", 1, 0)
        other.send([(0, frame(MESSAGE, FIRST, stage=2, payload=payload, signature=3))])
        assert settled(work)
        assert FAULT in [kind for kind, _ in words_of(other.words, FAULT)]


def test_a_call_without_a_kernel_is_an_error() -> None:
    call = Call("all_reduce", "bitwise_and", "float32", 1, None, "members")
    one = np.zeros(1, "float32")
    with two() as members:
        for member in members:  # the first one's reduction would end the process
            with pytest.raises(TypeError, match="no kernel"):
                start(member, call, one.ctypes.data, one.ctypes.data)


def say_goodbye(other: Peer, close: bool = True) -> None:
    other.send([(0, frame(GOODBYE, 0))])
    time.sleep(0.05)
    if close:
        other.words.close()
        other.data.close()


def test_what_was_offered_by_who_has_left_cannot_be_received() -> None:
    with peer() as other:
        other.send([(0, offer())])
        say_goodbye(other)
        out = np.zeros(LONG, "float32")
        work = receive(other.member, out)
        assert settled(work)
        found = other.member.culprit()
        assert found is not None
        assert found[:2] == ("left", 1)


@pytest.mark.parametrize("complete", [True, False])
def test_what_was_sent_by_who_has_left_is_received(complete: bool) -> None:
    with peer() as other:
        out = np.zeros(LONG, "float32")
        work = receive(other.member, out)
        other.send([(0, offer())])
        kind, key = words_of(other.words, ACCEPT)[-1]
        assert kind == ACCEPT
        chunk = CHOICES.largest_chunk()
        data = np.ones(LONG, "float32").tobytes()
        chunks = [data[at : at + chunk] for at in range(0, len(data), chunk)]
        frames = [(1, frame(DATA, key, offset=i, payload=c)) for i, c in enumerate(chunks)]
        say_goodbye(other, close=False)
        other.send(frames if complete else frames[:-1])
        other.words.close()
        other.data.close()
        assert settled(work)
        assert work.done == complete
        assert not complete or (out == 1).all()


def test_messages_alone_fail_when_their_member_leaves() -> None:
    x, out = np.zeros(LONG, "float32"), np.zeros(3, "float32")
    with peer() as other:
        works = [receive(other.member, out)]
        for dest in (1, 0):  # one is offered, and one is its own
            call = Call("send", None, "float32", LONG, dest, "members", tag=7)
            works.append(start(other.member, call, x.ctypes.data))
        assert other.member.leave(0.1).wait(25)
        for work in works:
            assert settled(work)
            assert work.failed


def test_calls_behind_a_death_have_their_numbers() -> None:
    with peer() as other:
        other.words.close()
        other.data.close()
        works = [start(other.member, BARRIER) for _ in range(3)]
        assert all(settled(work) and work.failed for work in works)
        assert [work.seq for work in works] == [0, 1, 2]


def test_who_leaves_for_a_death_is_not_its_culprit() -> None:
    """The last data of a call and the end of who sent it come together, a death before them."""
    broadcast = COLLECTIVES.index("broadcast")
    words = ((broadcast, 0, 1, 1, COUNT, None, None), 1, 0, 1 << 18)
    post = frame(POST, 0, payload=SIGNATURE, signature=len(SIGNATURE))
    data = frame(DATA, 0, payload=bytes(4 * COUNT))
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            pairs = [[socket.socketpair() for _ in range(3)] for _ in range(2)]
            mine = [[one.detach() for one, _ in channels] for channels in pairs]
            (root, _, root_data), dying = (
                [stack.enter_context(theirs) for _, theirs in channels] for channels in pairs
            )
            member = _native.TcpMember(0, [[], *mine])
            out = np.zeros(COUNT, "float32")
            work = member.start(words, SIGNATURE, 0, out.ctypes.data)
            for words_to in (root, dying[0]):
                assert words_of(words_to, POST) == [(POST, 0)]
                words_to.sendall(post)
            began = time.monotonic()
            for sock in dying:
                sock.close()
            time.sleep(0.02)
            root_data.sendall(data)
            root.close()
            late = time.monotonic() - began > 0.08  # after 0.1 s the call fails for the death
            assert work.wait(25) or late
            while member.culprit() is None:
                time.sleep(0.001)
            found = member.culprit()
            assert found is not None
            assert found[:2] == ("lost", 2)
            assert member.leave(2).wait(25)


def test_who_leaves_twice_has_left_both_times() -> None:
    with peer() as other:
        both = [other.member.leave(5), other.member.leave(1e18)]
        assert words_of(other.words, GOODBYE)
        assert all(farewell.wait(25) for farewell in both)


def test_a_long_time_is_no_short_one() -> None:
    with peer() as other:
        farewell = other.member.leave(1e18)
        assert not farewell.wait(0.1)  # the goodbye is not read yet
        assert words_of(other.words, GOODBYE)
        assert farewell.wait(1e18)


def test_a_signature_that_contradicts_itself_is_nonsense() -> None:
    with peer() as other:
        theirs = b"\0\0" + SIGNATURE[2:]
        other.member.start(CHAIN, SIGNATURE, 0, 0)
        other.send([(0, frame(POST, 0, payload=theirs, signature=len(theirs)))])
        deadline = time.monotonic() + 25
        while other.member.culprit() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        found = other.member.culprit()
        assert found is not None
        assert found[:2] == ("lost", 1)


def test_an_engine_without_memory_ends_the_member_and_not_the_process() -> None:
    with peer() as other:
        call = (1, 1, 1, 0, 1 << 57, None, None)
        huge = (call, *CHAIN[1:3], 16)  # whose chunks cannot even be counted
        work = other.member.start(huge, SIGNATURE, 0, 0)
        assert settled(work)
        found = other.member.culprit()
        assert found is not None
        assert found[:2] == ("aborted", 0)
        assert "cannot go on" in found[4]
        assert words_of(other.words, FAULT)[-1][0] == FAULT


def test_what_cannot_be_watched_is_refused_and_closed(tmp_path: object) -> None:
    with open(f"{tmp_path}/file", "w") as file:
        descriptors = [os.dup(file.fileno()) for _ in range(2)]
        with pytest.raises(PermissionError):  # epoll's word for what is no socket
            _native.TcpMember(0, [[], descriptors])
        for descriptor in descriptors:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)


def test_a_member_alone_works_in_its_caller() -> None:
    member = _native.TcpMember(0, [[]])
    x = np.ones(10_000_000, "float32")
    out = np.zeros_like(x)
    call = Call("all_reduce", "mean", "float32", x.size, None, "alone")
    works = [start(member, call, x.ctypes.data, out.ctypes.data, size=1) for _ in range(2)]
    assert [work.done for work in works] == [True, True]
    assert [work.seq for work in works] == [0, 1]
    assert (out == 1).all()
    member.abort("enough")
    assert start(member, BARRIER, size=1).failed
    assert member.leave(1).wait(25)


def test_the_kernel_looks_for_the_peers_host_and_not_for_a_peer_that_reads() -> None:
    with contextlib.ExitStack() as stack:
        mine, theirs = [], []
        with socket.create_server(("127.0.0.1", 0)) as server:
            for _ in range(3):
                mine.append(socket.create_connection(server.getsockname()))
                theirs.append(stack.enter_context(server.accept()[0]))
        seen = [stack.enter_context(one.dup()) for one in mine]
        member = _native.TcpMember(0, [[], [one.detach() for one in mine]])
        for one in seen:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert member.leave(1).wait(25)


def test_nothing_is_said_on_the_connection_of_probes() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    member = _native.TcpMember(0, [[], [mine.detach() for mine, _ in pairs]])
    (words, probes, data) = (theirs for _, theirs in pairs)
    with words, probes, data:
        probes.sendall(frame(POST, 0, payload=SIGNATURE, signature=len(SIGNATURE)))
        assert words_of(words, FAULT) == [(FAULT, 2 | 1 << 8)]
        assert member.leave(2).wait(25)


def test_staged_chunks_take_what_they_need() -> None:
    with two() as (first, second):
        x = np.ones(4096, "float32")
        outs = [np.zeros(2048, "float32") for _ in range(2)]
        call = Call("reduce_scatter", "sum", "float32", 2048, None, "members")
        index = COLLECTIVES.index("reduce_scatter")
        words = ((index, 1, 1, 0, 2048, None, None), 1, 0, 1 << 18)
        signature = signed(call)
        works = [
            member.start(words, signature, x.ctypes.data, out.ctypes.data)
            for member, out in zip((first, second), outs, strict=True)
        ]
        for work, out in zip(works, outs, strict=True):
            assert work.wait(25)
            assert (out == 2).all()
        assert first.staging_bytes() == 4 * 2048


@pytest.mark.parametrize("members", [2, 33, 300, 2000])
@pytest.mark.parametrize("path", ["direct", "chain"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_staging_is_bounded_with_any_number_of_members(
    collective: str, path: str, members: int
) -> None:
    index = COLLECTIVES.index(collective)
    way = PATHS.index(path)
    words = ((index, 1, 1, 0, 1 << 32, None, None), way, 0, 1 << 20)
    chunk, window, stages = _native.tcp_plan(words, 0, members)
    staged = sum(len(sources) for sources, *_, staged in stages if staged)
    assert 4 * chunk * window * staged <= 8 << 20


def _short_of_everything() -> None:
    import os
    import resource
    import signal
    import socket

    from allreduce import _native, errors
    from allreduce.comm import init
    from allreduce.comm.transports.tcp import opener as tcp_opener

    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    assert tcp_opener
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (6 << 20), limit[1]))  # no stack fits
    try:
        init(transport="tcp")
    except errors.JoinError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, limit)
    fds = [one.detach() for one in socket.socketpair()]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fds) + 1, limit[1]))
    try:
        _native.TcpMember(0, [[], fds])
    except OSError as error:
        print("files", error.errno)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    open_now = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
    print(open_now, signal.pthread_sigmask(signal.SIG_BLOCK, []))
    print(_native.TcpMember(0, [[]]).leave(1).wait(25))


def test_a_shortage_is_an_error_that_leaves_nothing_behind() -> None:
    command = [sys.executable, "-c", script_of(_short_of_everything)]
    (result,) = run_commands([command], [clean_environment()], 60)
    refused, *rest = result.stdout.splitlines()
    assert refused.startswith(
        "[tcp] rank 0: the system refuses a thread or descriptor for its connections: [Errno"
    )
    assert refused.endswith("ulimit -n for descriptors, -u and -v for threads")
    assert rest == ["files 24", "[] set()", "True"], result
