"""The machine's own limit, probed by native code in the very processes that take part.

Memory and compiled code travel as descriptors that the ranks open through /proc, so that nothing
has a name that could be left behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cases import Array, Case
from contest import PROBE, Contestant

from allreduce.comm import Communicator

_SOURCE = Path(__file__).with_name("probe.cpp")
_LINE_BYTES = 64
_TRIALS = 5  # runs per kind of store, of which the fastest counts


@dataclass(frozen=True)
class _Native(Contestant):
    """A contestant that times itself: a call from Python would cost as much as a small one."""

    def run(self, source: Array) -> float:
        """Do one run; returns its seconds on this rank."""
        self.refill(source)
        return float(self.call())


class Probe:
    """The compiled probe, loaded by every rank; making it is a collective call."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._library: ctypes.CDLL | None = None
        own = _compile() if comm.rank == 0 else -1
        path = _shared_descriptor(comm, own)
        if path:
            self._library = ctypes.CDLL(path)
            self._library.probe_all_reduce.restype = ctypes.c_double
            self._library.probe_header_bytes.restype = ctypes.c_size_t
        comm.barrier()
        if own >= 0:
            os.close(own)

    def contestants(self, case: Case) -> Sequence[Contestant]:
        """Make the probe's contestant with the faster kind of store; a collective call.

        Returns:
            The contestant, or nothing: the probe knows all_reduce of float32, and needs a compiler.
        """
        if self._library is None or (case.collective, case.dtype) != ("all_reduce", "float32"):
            return ()
        region = self._region(case)
        made = [self._contestant(case, region, stream) for stream in (False, True)]
        source = case.source(self._comm.rank)
        mine = np.array([[each.run(source) for each in made] for _ in range(_TRIALS)])
        fastest = self._comm.all_reduce(mine, op="max").min(axis=0)
        return (made[int(fastest.argmin())],)

    def _region(self, case: Case) -> mmap.mmap:
        """Map memory of all ranks; a collective call."""
        size = self._offset() + case.ranks * _lines(case) * _LINE_BYTES
        own = -1
        if self._comm.rank == 0:
            own = os.memfd_create("probe")
            os.posix_fallocate(own, 0, size)  # a shortage is an error here, and SIGBUS later
        path = _shared_descriptor(self._comm, own)
        descriptor = os.open(path, os.O_RDWR)
        region = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self._comm.barrier()
        if own >= 0:
            os.close(own)
        return region

    def _offset(self) -> int:
        """Return where the arrays begin, on a page of their own."""
        assert self._library is not None
        header = int(self._library.probe_header_bytes(self._comm.size))
        return -(-header // mmap.PAGESIZE) * mmap.PAGESIZE

    def _contestant(self, case: Case, region: mmap.mmap, stream: bool) -> Contestant:
        assert self._library is not None
        act, offset, lines = self._library.probe_all_reduce, self._offset(), _lines(case)
        start = offset + self._comm.rank * lines * _LINE_BYTES
        mine = np.frombuffer(region, np.float32, case.count, start)
        address = ctypes.c_void_p(np.frombuffer(region, np.uint8).ctypes.data)
        roomy = self._comm.size <= (os.cpu_count() or 1)  # launchers may bind each rank to a core
        arguments = (
            address,
            ctypes.c_size_t(offset),
            self._comm.rank,
            self._comm.size,
            ctypes.c_size_t(lines),
            int(stream),
            int(roomy),
        )
        return _Native(
            PROBE,
            case,
            refill=lambda source: np.copyto(mine, source),
            barrier=lambda: None,  # in the native code
            call=lambda: act(*arguments),
            result=lambda: mine,
        )


def _lines(case: Case) -> int:
    return -(-case.nbytes // _LINE_BYTES)


def _compile() -> int:
    """Compile the probe for this very processor; returns a descriptor, or -1 without a compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        print("no C++ compiler: the machine's limit is not probed", file=sys.stderr)
        return -1
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        flags = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC")
        subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(library)], check=True)
        return os.open(library, os.O_RDONLY | os.O_CLOEXEC)


def _shared_descriptor(comm: Communicator, own: int) -> str:
    """Return a path to rank 0's descriptor, or "" if that is -1; a collective call."""
    process, descriptor = comm.broadcast(np.array([os.getpid(), own], np.int64), root=0).tolist()
    return f"/proc/{process}/fd/{descriptor}" if descriptor >= 0 else ""
