"""Files replaced whole: what a killed writer leaves, and several writers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allreduce import files
from tests.harness import script_of


def write_for_ever(path: str) -> None:
    import os
    from pathlib import Path

    from allreduce import files

    contents = os.urandom(1) * 3_000_000
    print("writes", flush=True)
    while True:
        files.replace(Path(path), contents)


def started(path: Path) -> subprocess.Popen[str]:
    """Start a process that replaces a file for ever, and wait till it does."""
    command = [sys.executable, "-c", script_of(write_for_ever, str(path))]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writes\n"
    return writer


def kill(writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.communicate(timeout=60)


def test_what_killed_writers_leave_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path, deadline = tmp_path / "model", time.monotonic() + 60
    (tmp_path / ".model.settings").touch()
    while not [*tmp_path.glob(".allreduce*")]:  # else it was killed between two writes
        assert time.monotonic() < deadline, "no writer was killed within a write"
        kill(started(path))
    files.replace(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert sorted(os.listdir(tmp_path)) == [".model.settings", "model"]


def test_temporary_files_of_other_hosts_are_left_alone(tmp_path: Path) -> None:
    """Their writers may live: a network file system need not show their locks."""
    for host in ("", "0" * 16 + "-"):
        (tmp_path / f".allreduce-writing-{host}x3_t0f").touch()
    before = {*os.listdir(tmp_path)}
    files.replace(tmp_path / "model", b"whole")
    assert {*os.listdir(tmp_path)} == {*before, "model"}


def test_several_writers_leave_each_other_alone(tmp_path: Path) -> None:
    path = tmp_path / "model"
    writers = [started(path) for _ in range(3)]
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            files.replace(path, b"x" * 3_000_000)
            contents = path.read_bytes()
            assert len(contents) == 3_000_000
            assert contents == contents[:1] * 3_000_000
        assert [writer.poll() for writer in writers] == [None] * 3
    finally:
        for writer in writers:
            kill(writer)


def test_a_name_of_the_greatest_length_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    files.replace(path, b"whole")
    assert os.listdir(tmp_path) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o666 & ~files._umask()


def save_without_proc(path: str) -> None:
    import ctypes
    import os
    from pathlib import Path

    from allreduce import files

    libc = ctypes.CDLL(None)
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
        print("not root")
        return
    assert libc.mount(b"none", b"/proc", b"tmpfs", 0, None) == 0
    os.umask(0o027)
    files.replace(Path(path), b"whole")
    print(oct(os.stat(path).st_mode & 0o777))


def test_a_file_is_written_where_proc_is_hidden(tmp_path: Path) -> None:
    command = [sys.executable, "-c", script_of(save_without_proc, str(tmp_path / "model"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if result.stdout == "not root\n":
        pytest.skip("only root may hide /proc from a process of its own")
    assert result.stdout == "0o640\n", result
