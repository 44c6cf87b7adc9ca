"""Publish bytes under a name, to this machine's other processes of the same user.

Uses an abstract Unix socket: no file, no port, gone with the process, and the kernel identifies
both sides.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

from allreduce.cluster.host.waiting import Wait
from allreduce.errors import JoinError, TimeoutError

_RETRY_SECONDS = 0.05
_ANSWER_SECONDS = 5.0


class Publisher:
    """Publishes `payload` under `name` until `close()`.

    Raises:
        JoinError: Another process holds the name.
    """

    def __init__(self, name: str, payload: bytes) -> None:
        self._payload = payload
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{name}")
        except OSError as error:
            self._socket.close()
            raise JoinError(
                f"[cluster] rank 0: another process has taken the meeting point {name!r} "
                f"({error}): two tasks claim to be the first of the same step"
            ) from error
        self._socket.listen(128)
        self._thread = threading.Thread(target=self._show, name="allreduce-beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop publishing."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _show(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:  # closed
                return
            with visitor:
                if peer(visitor)[1] == os.getuid():
                    try:
                        visitor.settimeout(_ANSWER_SECONDS)
                        visitor.sendall(self._payload)
                    except OSError:  # it died; the leader will notice
                        continue


def fetch(name: str, timeout: float, who: str, owner: str) -> bytes:
    """Return the bytes published under `name`; blocks until there are some.

    Args:
        who: The waiting process, for messages, such as "rank 1".
        owner: The publishing process, for messages: "task 0 of step 7.0".

    Raises:
        JoinError: A process of another user holds the name.
        TimeoutError: No process published within `timeout` seconds.
    """
    wait = Wait(timeout)
    while wait.has_time_left(f"{owner}; every task has to call allreduce.init()"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
            visitor.settimeout(_ANSWER_SECONDS)
            try:
                visitor.connect(f"\0{name}")
                pid, uid = peer(visitor)
                if uid != os.getuid():
                    raise JoinError(
                        f"[cluster] {who}: process {pid} of user {uid} holds the meeting point "
                        f"{name!r}, which belongs to user {os.getuid()}; ask that user about it"
                    )
                if payload := _read_all(visitor):
                    return payload
            except OSError:  # not there yet, or closing
                time.sleep(_RETRY_SECONDS)
    raise TimeoutError(
        f"[cluster] {who}: {owner} did not publish its address within {timeout:g} s; every "
        "task has to call allreduce.init()"
    )


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end, from the kernel."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(4096):
        parts.append(part)
    return b"".join(parts)
