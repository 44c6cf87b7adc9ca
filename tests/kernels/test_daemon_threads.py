"""Daemon threads in native code do not abort a process that ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

KERNELS = """
import threading
import numpy as np
from allreduce import _native

numbers = np.arange(50_000)
arrays = np.empty_like(numbers), np.empty_like(numbers), np.empty(numbers.size + 1, np.int64)
running = threading.Semaphore(0)

def work():
    running.release()
    while True:
        _native.group_numbers(numbers, *arrays)

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
for _ in range(4):
    running.acquire()
"""

# Native code that sends a frame calls `describe`, which does not return.
CALLBACKS = """
import threading
import numpy as np
from allreduce import _native

running = threading.Semaphore(0)

def describe(*_):
    running.release()
    while True:
        pass

for _ in range(4):
    frames = _native.FrameSocket(-1, describe, describe)
    given = 0, 0, 0, b"", [np.arange(9)]
    threading.Thread(target=frames.send_small, args=given, daemon=True).start()
for _ in range(4):
    running.acquire()
"""


@pytest.mark.parametrize("program", [KERNELS, CALLBACKS], ids=["kernels", "callbacks"])
def test_a_process_ends_while_daemon_threads_run_native_code(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
