"""Accepting connections of members over tcp, among strangers' connections."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from allreduce.comm.transports.handshake import Credentials
from allreduce.comm.transports.tcp import connections
from allreduce.comm.transports.tcp.connections import Acceptor, Dialer
from allreduce.comm.transports.tcp.mesh import Mesh, Process
from tests.comm.transports.test_handshake import worlds


def test_a_connection_that_is_dropped_for_another_is_not_read_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_MAX_CALLERS", 1)
    held, inside, release = threading.Event(), threading.Event(), threading.Event()
    turns = iter(range(5))

    def hold(_: Acceptor) -> None:  # between two turns
        if held.is_set():
            inside.set()
            release.wait(25)
        if release.is_set() and next(turns, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(Acceptor, "_hear", hold)
    outcomes: list[object] = []

    def run() -> None:
        try:
            reception.run(time.monotonic() + 60)
        except BaseException as error:
            outcomes.append(error)

    world = worlds(2)[0]
    low = os.dup(0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        host, port = listener.getsockname()
        processes = tuple(Process(rank, 1, 1, host, port, 3) for rank in range(2))
        mesh = Mesh(world, Credentials(world.job, "1/tcp/meeting", world.secret), processes)
        calling = Dialer(mesh, time.monotonic() + 60)
        calling.start()
        reception = Acceptor(mesh, listener, calling)
        thread = threading.Thread(target=run)
        thread.start()
        with socket.create_connection((host, port)) as first:
            while not reception._callers and thread.is_alive():
                time.sleep(0.01)
            held.set()
            assert inside.wait(25)
            with socket.create_connection((host, port)):
                os.close(low)  # the second one's, so that the first one's is nobody's
                first.sendall(b"allreduce")
                release.set()
                thread.join(25)
    assert [type(outcome) for outcome in outcomes] == [KeyboardInterrupt], outcomes
