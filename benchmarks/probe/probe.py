"""The machine's limit, probed by native code in the measured processes.

Memory and compiled code are passed as descriptors that the ranks open through /proc, so that no
named file can be left behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measure.cases import Array, Case
from measure.contest import PRIVATE_PROBE, PROBE, Contestant

from allreduce.comm import Communicator

_SOURCES = [
    Path(__file__).with_name(name)
    for name in ("probe.cpp", "probe_private.cpp", "probe_exchange.cpp")
]
_LINE_BYTES = 64
_TRIALS = 5  # runs per way, of which the fastest counts
# As probe_private.cpp numbers them; in rings, between two ranks, with so many bytes at a time.
WAYS = ((0, 0), (1, 0), *((way, chunk << 10) for way in (2, 3) for chunk in (8, 16, 32, 64, 128)))
_PRIVATE = {"all_reduce": 0, "all_gather": 1, "broadcast": 2, "all_to_all": 3}


@dataclass(frozen=True)
class _Native(Contestant):
    """A contestant that times itself: a call from Python would cost as much as a small one."""

    region: mmap.mmap | None = None  # objects whose addresses native code holds

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
            self._library.probe_private.restype = ctypes.c_double
            self._library.probe_private_bytes.restype = ctypes.c_size_t
        comm.barrier()
        if own >= 0:
            os.close(own)

    def contestants(self, case: Case) -> Sequence[Contestant]:
        """Make the probes of a case, each in the fastest of its ways; a collective call.

        Returns:
            What the probes know: float32, and with a compiler only. In memory that all map it is
            all_reduce; of private arrays what copies, too.
        """
        if self._library is None or case.dtype != "float32":
            return ()
        found: list[Contestant] = []
        if case.collective == "all_reduce":
            region = self._region(self._offset() + case.ranks * _lines(case) * _LINE_BYTES)
            found += self._fastest([self._symmetric(case, region, s) for s in (0, 1)])
        if case.collective in _PRIVATE:
            x = np.empty(case.count, np.float32)
            out = x if case.in_place else np.empty(case.out_count, np.float32)
            found += self._fastest([self.private(case, *way, x, out) for way in WAYS])
        return found

    def _fastest(self, made: Sequence[Contestant]) -> Sequence[Contestant]:
        """Choose among ways to do the same; one that takes a negative time cannot be taken."""
        source = made[0].case.source(self._comm.rank)
        mine = np.array([[each.run(source) for each in made] for _ in range(_TRIALS)])
        mine[mine < 0] = np.inf
        fastest = self._comm.all_reduce(mine, op="max").min(axis=0)
        return [made[int(fastest.argmin())]] if np.isfinite(fastest).any() else []

    def _region(self, size: int) -> mmap.mmap:
        """Map memory of all ranks, zeros at first; a collective call."""
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

    def _symmetric(self, case: Case, region: mmap.mmap, stream: int) -> Contestant:
        assert self._library is not None
        act, offset, lines = self._library.probe_all_reduce, self._offset(), _lines(case)
        start = offset + self._comm.rank * lines * _LINE_BYTES
        mine = np.frombuffer(region, np.float32, case.count, start)
        arguments = (
            _address(region),
            ctypes.c_size_t(offset),
            self._comm.rank,
            self._comm.size,
            ctypes.c_size_t(lines),
            stream,
            self._roomy(),
        )
        return _native(PROBE, case, mine, mine, lambda: act(*arguments))

    def private(self, case: Case, way: int, chunk: int, x: Array, out: Array) -> Contestant:
        """Make the probe that moves private arrays, in one of its ways; a collective call."""
        assert self._library is not None
        region = self._region(int(self._library.probe_private_bytes(case.ranks)))
        act = self._library.probe_private
        arguments = (
            _address(region),
            self._comm.rank,
            self._comm.size,
            os.getpid(),
            ctypes.c_void_p(x.ctypes.data),
            ctypes.c_void_p(out.ctypes.data),
            ctypes.c_size_t(x.nbytes),
            _PRIVATE[case.collective],
            way,
            ctypes.c_size_t(chunk),
            self._roomy(),
        )
        return _native(PRIVATE_PROBE, case, x, out, lambda: act(*arguments), region)

    def _roomy(self) -> int:
        """Return whether each rank has its own core; launchers may bind each to one."""
        return int(self._comm.size <= (os.cpu_count() or 1))


def _native(
    name: str,
    case: Case,
    x: Array,
    out: Array,
    call: Callable[[], float],
    region: mmap.mmap | None = None,
) -> Contestant:
    return _Native(
        name,
        case,
        refill=lambda source: np.copyto(x, source),
        barrier=lambda: None,  # in the native code
        call=call,
        result=lambda: out,
        region=region,
    )


def _address(region: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(np.frombuffer(region, np.uint8).ctypes.data)


def _lines(case: Case) -> int:
    return -(-case.nbytes // _LINE_BYTES)


def _compile() -> int:
    """Compile the probes for this processor; returns a descriptor, or -1 without a compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        print("no C++ compiler: the machine's limit is not probed", file=sys.stderr)
        return -1
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        flags = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC")
        subprocess.run([compiler, *flags, *_SOURCES, "-o", library], check=True)
        return os.open(library, os.O_RDONLY | os.O_CLOEXEC)


def _shared_descriptor(comm: Communicator, own: int) -> str:
    """Return a path to rank 0's descriptor, or "" if that is -1; a collective call."""
    process, descriptor = comm.broadcast(np.array([os.getpid(), own], np.int64), root=0).tolist()
    return f"/proc/{process}/fd/{descriptor}" if descriptor >= 0 else ""
