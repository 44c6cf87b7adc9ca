"""Hosts that lack something: address space, /proc, a loopback interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.processes import Result, run
from tests.run.launches import LAUNCH, Write

SHOW = "world.exchange('end', b'', 20)\nprint('joined')"  # after joining


def launched(script: Write, *before: str) -> Result:
    """Run two ranks by a command that is put before the launcher's."""
    return run([*before, *LAUNCH, "-n", "2", str(script(SHOW))], deadline=25)


def test_too_little_address_space_is_told(script: Write) -> None:
    result = launched(script, "bash", "-c", 'ulimit -v 300000; exec "$@"', "limit")
    assert result.code == 1, result
    assert "MiB of address space" in result.err, result
    assert "ulimit -v allows" in result.err, result


def test_a_host_without_proc_has_files_to_open(script: Write) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and util-linux's unshare, to hide /proc")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs mount namespaces")
    result = launched(
        script, "unshare", "-m", "bash", "-c", 'mount -t tmpfs none /proc && exec "$@"', "hidden"
    )
    assert "file descriptors" not in result.err, result
    assert (result.code, result.out.count("joined")) == (0, 2), result


@pytest.fixture
def silent_host() -> Iterator[str]:
    """A network namespace whose loopback interface is down, as all are at first."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2's ip, for network namespaces")
    name = f"allreduce-test-{os.getpid()}-silent"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if made.returncode:
        pytest.skip(f"needs network namespaces: {made.stderr.strip()}")
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["ip", "netns", "del", name], timeout=20)
        yield name


def test_a_loopback_interface_that_is_down_is_told(script: Write, silent_host: str) -> None:
    result = launched(script, "ip", "netns", "exec", silent_host)
    assert result.code == 1, result
    assert "its loopback interface is down; bring it up with ip link set lo up" in result.err
    assert "Traceback" not in result.err
