"""Options of the tcp transport's sockets."""

from __future__ import annotations

import socket

import pytest

from allreduce.comm.transports.tcp import interface


def _congestion_control(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_only_a_network_is_paced() -> None:
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError as error:
            pytest.skip(f"CUBIC cannot be had here: {error}")
    with socket.socket() as plain, interface.stream("192.0.2.1") as outwards:
        assert _congestion_control(outwards) == _congestion_control(plain)
    with interface.stream("127.0.0.1") as listener, interface.stream("127.0.0.1") as caller:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        caller.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert _congestion_control(caller) == _congestion_control(accepted) == "cubic"
