"""The memory's limit: native code that reads one array and writes another."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from workloads.base import Array, Workload

_SOURCE = Path(__file__).with_suffix(".cpp")
_TRIALS = 5  # per kind of store, of which the fastest counts


def build(name: str, workload: Workload, rank: int, ports: Sequence[int]) -> tuple[int, Bandwidth]:
    """Make the only process's part."""
    return 0, Bandwidth(workload)


class Bandwidth:
    """The probe, with ordinary or with streaming stores: whichever are faster here."""

    about = "native code"

    def __init__(self, workload: Workload) -> None:
        self._library = _compile()
        self._out = np.empty(workload.rows, np.float32)
        x = np.ones(workload.rows, np.float32)
        self._streams = min((0, 1), key=lambda streams: self._fastest(x, streams))

    def _fastest(self, x: Array, streams: int) -> float:
        taken = []
        for _ in range(_TRIALS):
            start = time.perf_counter()
            self._copy(x, streams)
            taken.append(time.perf_counter() - start)
        return min(taken)

    def _copy(self, x: Array, streams: int) -> None:
        pointers = (ctypes.c_void_p(each.ctypes.data) for each in (x, self._out))
        self._library.read_and_write(*pointers, ctypes.c_size_t(x.size), streams)

    def step(self, *batch: Array) -> None:
        """Read the array, and write as much."""
        self._copy(batch[0], self._streams)

    def number(self, result: Any) -> float:
        return float("nan")  # it does other work than the others

    def figures(self, seconds: float) -> dict[str, float]:
        return {}


def _compile() -> ctypes.CDLL:
    """Compile the probe for this very processor."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise SystemExit("bandwidth: no C++ compiler, so that the memory's limit is not probed")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "bandwidth.so"
        flags = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC")
        subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))
