"""Daemon threads in native code do not abort a process that ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
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


def test_a_process_ends_while_daemon_threads_run_kernels() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
