"""What sockets of the tcp transport are made with."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from allreduce.comm.tcp import interface

_KNOWN = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def _congestion_control(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_only_a_network_is_paced() -> None:
    if "cubic" not in _KNOWN.read_text().split():
        pytest.skip("this host's kernel has no CUBIC")
    with socket.socket() as plain, interface.stream("192.0.2.1") as outwards:
        assert _congestion_control(outwards) == _congestion_control(plain)
    with interface.stream("127.0.0.1") as listener, interface.stream("127.0.0.1") as caller:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        caller.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert _congestion_control(caller) == _congestion_control(accepted) == "cubic"
