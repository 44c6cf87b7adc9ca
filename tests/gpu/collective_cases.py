"""A rank that runs the cases of CPU collectives with its arrays on its GPU.

python -m allreduce.run -n 3 tests/gpu/collective_cases.py CASE…
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import allreduce as ar
from allreduce import devices
from allreduce.comm import Communicator
from allreduce.comm.transports.nccl.carries import OPERATORS, TYPES
from tests.comm.cases.operator_cases import SENSE, reduces
from tests.comm.ranks.pool import case

_MOVED = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter", "broadcast"),
    "all_to_all",
)


class OnGpu:
    """A communicator of NumPy arrays whose collectives run on copies of these on the GPU."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._gpu = comm, devices.lookup("GPU:0")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)
        if name not in _MOVED:
            return method

        def call(x: Any, *, out: Any = None, async_op: bool = False, **named: Any) -> Any:
            given, target = self._pair(x, out)
            result = method(given, out=target, async_op=async_op, **named)
            work = Moved(result, target, out)
            return work if async_op else work.wait()

        return call

    def _pair(self, x: Any, out: Any) -> tuple[Any, Any]:
        """Copy both to the GPU; parts of one array stay parts of one."""
        if x is None or out is None or not np.shares_memory(x, out):
            return self._there(x), self._there(out)
        larger, smaller = (x, out) if x.size > out.size else (out, x)
        whole = self._there(larger)
        first = (smaller.ctypes.data - larger.ctypes.data) // larger.itemsize
        part = whole.reshape(-1)[first : first + smaller.size].reshape(smaller.shape)
        return (whole, part) if larger is x else (part, whole)

    def _there(self, array: Any) -> Any:
        if array is None:
            return None
        array = np.asarray(array)
        made = self._gpu.allocate(array.nbytes).array(array.dtype, array.shape)
        devices.write(made, array)
        return made


class Moved:
    """A call's work, whose result is copied back."""

    def __init__(self, work: Any, target: Any, out: Any) -> None:
        self._work, self._target, self._out = work, target, out

    def wait(self, timeout: float | None = None) -> Any:
        waits = hasattr(self._work, "wait")
        result = self._work.wait(timeout) if waits else self._work
        if result is None:
            return None
        if self._out is None:
            return devices.read(result)
        assert result is self._target
        self._out[...] = devices.read(result)
        return self._out

    def done(self) -> bool:
        finished: bool = self._work.done()
        return finished


def carried_pairs(comm: Any) -> None:
    """Reduce every type by every operator that NCCL has for it."""
    for op, dtype in SENSE:
        if dtype in TYPES and op in OPERATORS and op.startswith("logical") == (dtype == "bool"):
            reduces(comm, "private", op, dtype)


def main() -> None:
    comm: Any = ar.init(timeout=30)
    assert comm.transport == "nccl"
    for name in sys.argv[1:]:
        function = globals().get(name) or case(name)
        function(OnGpu(comm), *(["private"] if function.__code__.co_argcount == 2 else []))
        if comm.rank == 0:
            print(name, flush=True)
    comm.close()


if __name__ == "__main__":
    main()
