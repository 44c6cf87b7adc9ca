"""Test hosts go away, also those of a test that could not remove them."""

from __future__ import annotations

import subprocess
import sys

from tests import netns


def listed() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_hosts_reach_each_other_and_leave_nothing() -> None:
    with netns.hosts(2) as (first, second):
        ping = "import socket; socket.create_server(('', 7)).accept()"
        with subprocess.Popen(first.command(sys.executable, "-c", ping)) as answering:
            call = f"""
import socket, time
for _ in range(200):
    try:
        socket.create_connection(('{first.address}', 7), 1)
        break
    except OSError:
        time.sleep(0.05)
else:
    raise SystemExit(1)
"""
            reached = subprocess.run(second.command(sys.executable, "-c", call), timeout=30)
            answering.kill()
        assert reached.returncode == 0
    assert first.name not in listed()


def test_leftovers_of_a_killed_test_are_removed() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    with netns.hosts(1):  # or the test is skipped
        left = f"allreduce-test-{ended.pid}-0"
        subprocess.run(["ip", "netns", "add", left], check=True)
        netns.remove_leftovers()
        assert left not in listed()
