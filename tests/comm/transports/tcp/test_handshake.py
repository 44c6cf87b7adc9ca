"""Only members of the job get a connection; others are dropped and logged."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from allreduce import errors
from allreduce.cluster.leader.proof import PROOF_BYTES
from allreduce.cluster.world import World
from allreduce.comm.transports import handshake
from allreduce.comm.transports.handshake import Challenge, Credentials, HandshakeError, receive
from allreduce.comm.transports.tcp import connections
from allreduce.comm.transports.tcp import interface as tcp_interface
from allreduce.comm.transports.tcp.connections import HELLO_BYTES, Dialer, Hello
from allreduce.comm.transports.tcp.mesh import Mesh, Process
from allreduce.comm.transports.tcp.rendezvous import connect
from tests.comm.transports.test_handshake import worlds

MEETING = Credentials("job", "1/tcp/world", b"secret")
HELLO = Hello(2, caller=2, callee=0, channel=1, channels=2)
HEAD = struct.pack("!16sI", b"allreduce job le", handshake.VERSION)


def begin() -> Challenge:
    return Challenge(MEETING, HELLO_BYTES)


def hello_with(nonce: bytes) -> bytes:
    """Return a caller's first message."""
    return HEAD + nonce + HELLO.pack()


def shake(caller: Credentials, hello: Hello = HELLO) -> tuple[Any, Any]:
    """Let a caller and a listener shake hands; return both results or errors."""
    ours, theirs = socket.socketpair()
    outcomes: list[Any] = [None, None]

    def listen() -> None:
        begun = begin()
        try:
            while outcomes[1] is None:
                message = receive(theirs, begun.expects)
                reply, outcomes[1] = begun.answer(message)
                theirs.sendall(reply)
        except (HandshakeError, OSError) as error:
            outcomes[1] = error
        theirs.close()

    thread = threading.Thread(target=listen)
    thread.start()
    with ours:
        ours.settimeout(25)
        try:
            handshake.call(ours, caller, hello.pack())
        except (HandshakeError, OSError) as error:
            outcomes[0] = error
    thread.join(25)
    return outcomes[0], outcomes[1]


def test_members_of_one_job_recognise_each_other() -> None:
    assert shake(MEETING) == (None, HELLO.pack())


@pytest.mark.parametrize("changed", [{"secret": b"other"}, {"name": "other"}, {"job": "other"}])
def test_a_caller_without_the_secret_is_refused_by_both(changed: dict[str, Any]) -> None:
    called, answered = shake(replace(MEETING, **changed))
    assert isinstance(called, HandshakeError)
    assert "does not know the job's secret" in str(called)
    assert isinstance(answered, HandshakeError | OSError)


def test_a_caller_of_another_version_is_refused() -> None:
    packed = hello_with(bytes(32))
    assert packed[16:20] == handshake.VERSION.to_bytes(4, "big")
    other = handshake.VERSION + 1
    told = f"it speaks version {other} of this protocol, not {handshake.VERSION}"
    with pytest.raises(HandshakeError, match=told):
        begin().answer(packed[:16] + other.to_bytes(4, "big") + packed[20:])


def test_a_proof_cannot_be_played_back() -> None:
    """Neither the listener's own proof nor that of another handshake is taken for the caller's."""
    nonce = bytes(32)
    packed = hello_with(nonce)
    begun = begin()
    reply, _ = begun.answer(packed)
    with pytest.raises(HandshakeError, match="secret"):
        begun.answer(reply[-PROOF_BYTES:])
    first, second = begin(), begin()
    theirs = first.answer(packed)[0][:32]
    second.answer(packed)
    proof = MEETING.proof("caller", packed, theirs)
    assert first.answer(proof)[1] == HELLO.pack()
    with pytest.raises(HandshakeError, match="secret"):
        second.answer(proof)


def mutated(draw: random.Random, message: bytes) -> bytes:
    changed = bytearray(message)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def fuzz_handshakes(seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    for _ in range(rounds):
        packed = hello_with(draw.randbytes(32))
        begun = begin()
        first = draw.choice([packed, mutated(draw, packed), draw.randbytes(len(packed))])
        try:
            reply, nobody = begun.answer(first)
            assert nobody is None
            proof = MEETING.proof("caller", packed, reply[:32])
            second = draw.choice([mutated(draw, proof), draw.randbytes(PROOF_BYTES), proof])
            _, found = begun.answer(second)
        except HandshakeError:
            continue
        assert (first, second) == (packed, proof)
        assert found == HELLO.pack()


def test_mutated_handshakes_are_refused() -> None:
    fuzz_handshakes(20260, 2000)


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_mutated_handshakes_are_refused_for_long() -> None:
    fuzz_handshakes(20261, 120_000)  # one in nine is as it should be


def meet(
    ranks: list[World],
    timeout: float = 60,
    intrude: Callable[[tuple[str, int]], None] | None = None,
) -> list[Any]:
    """Let all ranks connect, each in a thread; `intrude` calls rank 0 before the others do."""
    outcomes: list[Any] = [None] * len(ranks)

    def run(world: World) -> None:
        try:
            if intrude is not None and world.rank == len(ranks) - 1:
                intrude(address_of(ranks[0]))
            outcomes[world.rank] = connect(world, "meeting", 1, timeout)
        except Exception as error:
            outcomes[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,)) for world in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 25)
    return outcomes


def address_of(world: World) -> tuple[str, int]:
    """Return a rank's address once it is published."""
    facts = json.loads(world.store.get(f"1/tcp/meeting/{world.rank}", 25))
    return facts[2], facts[3]


def close(outcomes: list[Any]) -> None:
    for mesh in outcomes:
        if isinstance(mesh, Mesh):
            mesh.close()


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TCP_INTERFACE", "127.0.0.1")


def test_everybody_is_connected_with_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TCP_CONNECTIONS", "2")
    outcomes = meet(worlds(4))
    for rank, mesh in enumerate(outcomes):
        assert isinstance(mesh, Mesh), outcomes
        peers = [other for other in range(4) if other != rank]
        assert sorted(mesh.sockets) == [
            (rank, other, channel) for other in peers for channel in range(4)
        ]
    for (low, high, channel), sock in outcomes[0].sockets.items():
        sock.sendall(bytes([low, high, channel]))
        assert outcomes[high].sockets[high, low, channel].recv(3) == bytes([low, high, channel])
    close(outcomes)


def test_strangers_are_dropped_and_logged_and_the_members_meet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held: list[socket.socket] = []

    def intrude(address: tuple[str, int]) -> None:
        noises = (
            b"",
            b"GET / HTTP/1.0\r\n\r\n",
            os.urandom(5000),
            bytes(len(HEAD) + 32 + HELLO_BYTES),
        )
        for noise in noises:
            stranger = socket.create_connection(address)
            stranger.sendall(noise)
            stranger.close()
        for _ in range(20):  # slow ones, all at once: they must not hold up the others
            held.append(socket.create_connection(address))
            held[-1].sendall(b"allreduce")

    begun = time.monotonic()
    outcomes = meet(worlds(3), intrude=intrude)
    assert all(isinstance(outcome, Mesh) for outcome in outcomes), outcomes
    assert time.monotonic() - begun < 25  # their turns one after the other take 200
    for sock in held:
        sock.close()
    close(outcomes)
    assert "[tcp] dropped a connection from 127.0.0.1" in caplog.text


def test_slow_strangers_are_dropped_after_their_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "STRANGER_SECONDS", 0.2)
    called = Dialer._call
    dropped = threading.Semaphore(0)

    def late(*arguments: Any) -> None:
        """Call when the strangers are dropped, and take longer than they if need be."""
        assert all(dropped.acquire(timeout=25) for _ in range(2))
        monkeypatch.setattr(connections, "STRANGER_SECONDS", 60)
        called(*arguments)
        dropped.release(2)  # for the next call

    def dawdle(address: tuple[str, int], drips: bool) -> None:
        with socket.create_connection(address) as slow, contextlib.suppress(ConnectionError):
            begun = time.monotonic()
            slow.settimeout(0.05)
            slow.sendall(b"allreduce")
            while time.monotonic() - begun < 25:
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(1):
                        break
                if drips:  # what it sends gains it no time
                    slow.sendall(b"a")
            else:
                return
        dropped.release()

    threads: list[threading.Thread] = []

    def intrude(address: tuple[str, int]) -> None:
        for drips in (False, True):
            threads.append(threading.Thread(target=dawdle, args=(address, drips)))
            threads[-1].start()

    monkeypatch.setattr(Dialer, "_call", late)
    outcomes = meet(worlds(2), intrude=intrude)
    assert all(isinstance(outcome, Mesh) for outcome in outcomes), outcomes
    for thread in threads:
        thread.join(25)
    close(outcomes)
    assert caplog.text.count("it did not authenticate within 0.2 s") == 2


def test_who_has_the_secret_still_gets_no_place_but_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = worlds(3)[0]
    meeting = Credentials(world.job, "1/tcp/meeting", world.secret)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    host, port = listener.getsockname()
    mesh = Mesh(world, meeting, tuple(Process(rank, 1, 1, host, port, 2) for rank in range(3)))
    calling = Dialer(mesh, time.monotonic() + 60)
    calling.start()
    reception = connections.Acceptor(mesh, listener, calling)
    thread = threading.Thread(target=reception.run, args=(time.monotonic() + 60,))
    thread.start()

    def call(**changed: int) -> str:
        with socket.create_connection((host, port), timeout=25) as sock:
            try:
                handshake.call(sock, meeting, HELLO._replace(**changed).pack())
            except HandshakeError:
                return caplog.messages[-1].rpartition(": ")[2]
        return "welcome"

    taken = "member 2 is connected already, or not expected"
    assert call(rank=1) == "it is rank 1 of another world"
    assert call(channels=3) == "it is rank 2 of another world"
    assert call(channel=2) == call(callee=1) == taken
    assert call(caller=0) == taken.replace("2", "0")
    assert call(caller=3, rank=3) == taken.replace("2", "3")
    assert call() == "welcome"
    assert call() == taken
    for own in ({"channel": 0}, {"rank": 1, "caller": 1}, {"rank": 1, "caller": 1, "channel": 0}):
        assert call(**own) == "welcome"
    thread.join(25)
    assert not thread.is_alive()
    assert sorted(mesh.sockets) == [(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)]
    mesh.close()
    listener.close()


def test_a_rank_with_another_secret_is_refused() -> None:
    first, second = meet(worlds(2, secrets={1: b"wrong"}))
    assert isinstance(second, errors.JoinError)
    assert "does not know the job's secret" in str(second)
    assert isinstance(first, errors.JoinError)  # as soon as the second one tells it
    assert "rank 0: not joined: [tcp] rank 1 could not join" in str(first)


@pytest.fixture(params=[0, 8])
def caller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Rank 1, while rank 0 is stopped: only its kernel accepts connections, or nothing does."""
    with socket.create_server(("127.0.0.1", 0), backlog=request.param) as still:
        address = still.getsockname()
        with contextlib.nullcontext() if request.param else socket.create_connection(address):
            told = json.dumps([os.getpid(), 1, *address, 2, "", ""]).encode()
            monkeypatch.setattr(World, "exchange", lambda *_: [told, told])
            yield worlds(2)[1]


def test_an_interrupt_cuts_calls_short(caller: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def interrupt(_: connections.Acceptor) -> None:
        looks.append(1)
        if len(looks) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(connections.Acceptor, "_hear", interrupt)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        connect(caller, "meeting", 1, 60)
    assert time.monotonic() - begun < 25
    assert not [one for one in threading.enumerate() if one.name == "tcp-meeting"]


def test_a_rank_that_calls_hears_that_another_has_failed(caller: World) -> None:
    caller.store.set("1/tcp/meeting/failed", b"[tcp] rank 0: it has no luck")
    begun = time.monotonic()
    with pytest.raises(errors.JoinError, match="it has no luck"):
        connect(caller, "meeting", 1, 60)
    assert time.monotonic() - begun < 25


def test_ranks_that_do_not_come_are_named() -> None:
    for outcome in meet(worlds(3)[:2], timeout=2):
        assert isinstance(outcome, errors.TimeoutError)
        assert "rank 2" in str(outcome)


def test_a_network_is_no_place_for_a_job_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_interface, "address", lambda _: "192.0.2.1")
    for outcome in meet(worlds(2, secrets={0: b"", 1: b""})):
        assert isinstance(outcome, errors.UsageError)
        assert "set ALLREDUCE_SECRET" in str(outcome)
