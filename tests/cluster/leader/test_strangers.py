"""Strangers at leader, member and publisher: forged, replayed and large messages."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.leader import proof, session
from allreduce.cluster.leader.rpc import MAX_VALUE_BYTES, PROTOCOL, grpc, leader_pb2_grpc
from allreduce.cluster.leader.service import Leader
from allreduce.cluster.leader.session import GREETING_BYTES, HANDSHAKE_SECONDS, STRANGERS
from allreduce.cluster.resolvers import rendezvous
from allreduce.errors import JoinError
from tests.cluster.leader.test_service import SECRET, hosting, meeting
from tests.cluster.processes import running

CLAIM = (1, 2, 1, 4711)  # rank, size, generation, process
NONCE = bytes(range(32))
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


class Raw:
    """A call to the leader with given messages."""

    def __init__(self, address: str) -> None:
        self._outbox: queue.SimpleQueue[pb.FromMember | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=UNLIMITED)
        stub = leader_pb2_grpc.LeaderStub(self._channel)  # type: ignore[no-untyped-call]
        self.call: Any = stub.Attend(iter(self._outbox.get, None), timeout=60)

    def says(self, message: pb.FromMember) -> pb.ToMember | None:
        """Send; returns the answer, None where the leader has ended the call."""
        self._outbox.put(message)
        answer = next(self.call, None)
        assert isinstance(answer, pb.ToMember | None)
        return answer

    def hello(self, nonce: bytes = NONCE, host: str = "here") -> pb.ToMember | None:
        rank, size, generation, pid = CLAIM
        identity = pb.Identity(rank=rank, host=host, pid=pid)
        hello = pb.Hello(
            protocol=PROTOCOL, size=size, generation=generation, identity=identity, nonce=nonce
        )
        return self.says(pb.FromMember(hello=hello))

    def proves(self, shown: bytes) -> pb.ToMember | None:
        return self.says(pb.FromMember(proof=pb.Proof(proof=shown)))

    def close(self) -> None:
        self._outbox.put(None)
        self._channel.close()


@pytest.fixture
def leader() -> Iterator[Leader]:
    with hosting(2) as hosted:
        yield hosted


@pytest.fixture
def calls(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Raw]]:
    """Call the leader, which waits for what a busy machine says late."""
    monkeypatch.setattr(session, "HANDSHAKE_SECONDS", 60)
    with contextlib.ExitStack() as stack:

        def call() -> Raw:
            raw = Raw(leader.address)
            stack.callback(raw.close)
            return raw

        yield call


def challenged(raw: Raw) -> pb.Challenge:
    answer = raw.hello()
    assert answer is not None
    assert answer.WhichOneof("content") == "challenge"
    return answer.challenge


def right(challenge: pb.Challenge) -> bytes:
    return proof.prove(SECRET, "member", (NONCE, challenge.nonce), CLAIM)


def is_refused(answer: pb.ToMember | None, why: str, leader: Leader) -> None:
    assert answer is not None
    assert answer.WhichOneof("content") == "refusal"
    assert why in answer.refusal.why
    assert not leader.groups  # no stranger was let in


def test_the_right_proof_is_welcome(leader: Leader, calls: Callable[[], Raw]) -> None:
    raw = calls()
    answer = raw.proves(right(challenged(raw)))
    assert answer is not None
    assert answer.WhichOneof("content") == "welcome"
    assert leader.groups[1].connected == [1]


@pytest.mark.parametrize(
    "forged", [b"", b"x" * 32, proof.prove(b"", "member", (NONCE,) * 2, CLAIM)]
)
def test_a_wrong_proof_is_refused(leader: Leader, calls: Callable[[], Raw], forged: bytes) -> None:
    raw = calls()
    challenged(raw)
    is_refused(raw.proves(forged), "the secret is wrong", leader)


def test_a_proof_of_another_session_is_refused(leader: Leader, calls: Callable[[], Raw]) -> None:
    first, second = calls(), calls()
    recorded = right(challenged(first))
    challenged(second)
    is_refused(second.proves(recorded), "the secret is wrong", leader)


def test_the_leaders_own_proof_does_not_come_back_as_the_members(
    leader: Leader, calls: Callable[[], Raw]
) -> None:
    raw = calls()
    is_refused(raw.proves(challenged(raw).proof), "the secret is wrong", leader)


def test_requests_before_the_proof_end_the_call(leader: Leader, calls: Callable[[], Raw]) -> None:
    assert calls().says(pb.FromMember(request=1, set=pb.Set(key="k", value=b"v"))) is None
    raw = calls()
    challenged(raw)
    assert raw.says(pb.FromMember(request=1, get=pb.Get(key="k"))) is None
    assert not leader.groups


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_nonce_of_another_length_is_refused(
    leader: Leader, calls: Callable[[], Raw], length: int
) -> None:
    is_refused(calls().hello(bytes(length)), f"a nonce of {length} bytes", leader)


def test_a_large_greeting_is_refused(leader: Leader, calls: Callable[[], Raw]) -> None:
    is_refused(calls().hello(host="h" * GREETING_BYTES), "a hello of 41", leader)
    raw = calls()
    challenged(raw)
    is_refused(raw.proves(bytes(2**20)), "a proof of 1048", leader)


def test_a_message_above_the_servers_cap_ends_the_call(calls: Callable[[], Raw]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        calls().hello(host="h" * (MAX_VALUE_BYTES + 2**17))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_strangers_cannot_hold_more_than_a_few_places(
    leader: Leader, calls: Callable[[], Raw]
) -> None:
    strangers = [calls() for _ in range(2 + STRANGERS)]
    for stranger in strangers:
        challenged(stranger)
    with pytest.raises(grpc.RpcError) as caught:
        calls().hello()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    with ThreadPoolExecutor(2) as pool:  # a member of the job tries again, and gets in
        joining = [pool.submit(meeting(leader.address, rank, 2).join) for rank in range(2)]
        time.sleep(0.3)
        assert not leader.groups
        for stranger in strangers:
            stranger.close()
        for world in [one.result(20) for one in joining]:
            world.close()


@pytest.mark.parametrize("calling", [False, True])
def test_members_outlast_strangers_that_speak_http2_and_say_nothing(
    leader: Leader, calls: Callable[[], Raw], calling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HANDSHAKE_SECONDS", HANDSHAKE_SECONDS)  # which ends their calls
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for _ in range(2 + STRANGERS):
            if calling:
                calls()
                continue
            channel = stack.enter_context(grpc.insecure_channel(leader.address, options=UNLIMITED))
            grpc.channel_ready_future(channel).result(25)
        joining = [pool.submit(meeting(leader.address, rank, 2).join) for rank in range(2)]
        for world in [one.result(20) for one in joining]:
            world.close()


class Forger(leader_pb2_grpc.LeaderServicer):
    """A leader that knows the secret, and sends a nonce of another length."""

    def Attend(self, requests: Iterator[pb.FromMember], _: Any) -> Iterator[pb.ToMember]:  # noqa: N802
        hello = next(requests).hello
        claim = (hello.identity.rank, hello.size, hello.generation, hello.identity.pid)
        shown = proof.prove(SECRET, "leader", (hello.nonce, b""), claim)
        yield pb.ToMember(challenge=pb.Challenge(nonce=b"", proof=shown))
        next(requests, None)


def test_a_member_refuses_a_leader_without_a_whole_nonce() -> None:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        leader_pb2_grpc.add_LeaderServicer_to_server(Forger(), server)  # type: ignore[no-untyped-call]
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            with pytest.raises(JoinError, match="does not know this process's secret"):
                meeting(address, 1, 2).join()
        finally:
            server.stop(None).wait(25)


def test_no_secret_is_in_a_repr() -> None:
    assert SECRET.decode() not in repr(meeting("127.0.0.1:1", 0, 2))


@pytest.mark.parametrize("stranger", [False, True])
def test_a_beacon_shows_nothing_to_another_user(
    monkeypatch: pytest.MonkeyPatch, stranger: bool
) -> None:
    name = f"allreduce-test/{uuid.uuid4()}"
    publisher = rendezvous.Publisher(name, b"secret")
    monkeypatch.setattr(rendezvous, "peer", lambda _: (os.getpid(), os.getuid() + stranger))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
            visitor.settimeout(25)
            visitor.connect(f"\0{name}")
            assert visitor.recv(100) == (b"" if stranger else b"secret")
    finally:
        publisher.close()


FEW_FILES = """
import os, resource, socket, sys, time
from allreduce.cluster.leader.service import Leader

most = len(os.listdir("/proc/self/fd")) + 48
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
leader = Leader("127.0.0.1:0", 2, b"secret")
print(leader.address, flush=True)
time.sleep(2)  # strangers come
try:
    kept = [os.pipe() for _ in range(8)]
    print("enough", flush=True)
    for ends in kept:
        for end in ends:
            os.close(end)
except OSError as error:
    print(error, flush=True)
time.sleep(60)
"""


def test_strangers_that_trickle_bytes_leave_a_leader_files_and_places() -> None:
    """They never complete gRPC's handshake: connections count, and last for seconds."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(running([sys.executable, "-c", FEW_FILES]))
        address = process.line()
        port = int(address.rpartition(":")[2])
        for _ in range(60):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 25))
            with contextlib.suppress(OSError):  # it was turned away
                stranger.sendall(b"P")
        assert process.line() == "enough"
        with ThreadPoolExecutor(2) as pool:
            joining = [
                pool.submit(meeting(address, rank, 2, secret=b"secret").join) for rank in range(2)
            ]
            for world in [one.result(25) for one in joining]:
                world.close()
