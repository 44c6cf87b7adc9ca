"""Connections to the group leader, and to a cluster's task: stopped clients, and interrupts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time

import pytest

import allreduce as ar
from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.leader import proof
from allreduce.cluster.leader.channel import LeaderChannel
from allreduce.cluster.leader.rpc import PROTOCOL
from allreduce.cluster.leader.service import Leader
from tests.cluster.processes import running
from tests.harness import free_port
from tests.server.clusters import serving

_MEMBER = """
import sys
import grpc
import allreduce as ar
print("ready", flush=True)
ar.init(rank=1, size=2, leader=sys.argv[1], secret="a secret", timeout=60)
"""


def user_timeouts(port: int) -> list[int]:
    """Return TCP_USER_TIMEOUT of this process's connections from and to a port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        # Closed descriptors, other files and listening sockets raise.
        with contextlib.suppress(OSError), socket.socket(fileno=int(name)) as borrowed:
            try:
                ends = (*borrowed.getsockname()[1:2], *borrowed.getpeername()[1:2])
                if port in ends:  # addresses of Unix sockets are text
                    found.append(borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
            finally:
                borrowed.detach()
    return found


def test_no_connection_ends_for_a_member_that_does_not_read() -> None:
    leader = Leader("127.0.0.1:0", 2, b"secret")
    channel = LeaderChannel(leader.address, 20)
    try:
        hello = pb.Hello(protocol=PROTOCOL, size=2, nonce=proof.nonce())
        channel.send(pb.FromMember(hello=hello))
        assert channel.greeting(25).HasField("challenge")  # it is connected
        assert user_timeouts(int(leader.address.rpartition(":")[2])) == [0, 0]
    finally:
        channel.abort()
        leader.close()


def test_a_leader_that_takes_the_call_and_closes_is_noticed_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all() -> None:
            with contextlib.suppress(OSError):  # the test has ended
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(b"\0\0\0\4\0\0\0\0\0")  # HTTP/2: no settings
                        connection.recv(4096)

        threading.Thread(target=close_all, daemon=True).start()
        for _ in range(6):
            channel = LeaderChannel(f"127.0.0.1:{listener.getsockname()[1]}", 20)
            try:
                with pytest.raises(ConnectionError, match=r"Stream|Socket|connection"):
                    channel.greeting(25)
            finally:
                channel.abort()
        listener.shutdown(socket.SHUT_RDWR)


def test_another_program_at_the_address_is_told_from_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        channel = LeaderChannel(f"127.0.0.1:{other.getsockname()[1]}", 20)
        with pytest.raises(ConnectionError, match="does not answer as a leader does"):
            channel.greeting(0.5)
        channel.abort()


def test_a_member_that_gives_up_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    channel = LeaderChannel(f"127.0.0.1:{free_port()}", 20)
    with pytest.raises(ConnectionError, match="no leader answers"):
        channel.greeting(0.55)
    channel.abort()
    for thread in set(threading.enumerate()) - before:
        thread.join(25)
        assert not thread.is_alive(), thread


def test_no_connection_ends_for_a_session_that_does_not_read() -> None:
    with serving(worker=1) as (server,):
        address = server.cluster.address("worker", 0)
        with ar.Session(f"grpc://{address}"):
            assert user_timeouts(int(address.rpartition(":")[2])) == [0, 0]


def test_ctrl_c_ends_a_program_that_waits_for_its_leader() -> None:
    with contextlib.ExitStack() as stack:
        command = (sys.executable, "-c", _MEMBER, f"127.0.0.1:{free_port()}")
        members = [stack.enter_context(running(command)) for _ in range(5)]
        for each in members:
            assert each.line() == "ready"
        time.sleep(0.3)  # gRPC tries to connect
        for each in members:
            each.signal(signal.SIGINT)
        for each in members:
            assert each.finish(25).code == -signal.SIGINT
