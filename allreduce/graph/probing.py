"""What a collective takes, measured between two steps by all replicas together."""

from __future__ import annotations

import time

import numpy as np

from allreduce.comm import Communicator, exchange
from allreduce.reduction import BUCKET_BYTES, Costs

_TRIES = 4


def costs_of(communicator: Communicator | None, gradients: np.ndarray) -> Costs | None:
    """Measure a collective, together with all members; what is among the gradients is lost.

    Returns None where a large one took no longer than a small one: this tells of other programs.
    """
    assert communicator is not None, "one of several"
    exchange(communicator, "a measurement of collectives", np.zeros(1))  # all are here, or told
    gradients[...] = 0
    small, large = (
        gradients[: gradients.size // 64],
        gradients[: BUCKET_BYTES // gradients.itemsize],
    )
    few = min(_exposed(communicator, small, 0.0) for _ in range(_TRIES))
    # In turn, as others may use the machine for a while; the first one sets something up.
    alone, exposed = [_exposed(communicator, large, 0.0)], []
    for _ in range(_TRIES):
        alone.append(_exposed(communicator, large, 0.0))
        exposed.append(_exposed(communicator, large, min(alone)))
    many = min(alone)
    if many <= few:
        return None
    per_byte = (many - few) / (large.nbytes - small.nbytes)
    # What is hidden once in a while cannot be counted on.
    beside = max(0.0, 1 - max(exposed) / many)
    return Costs(max(0.0, few - small.nbytes * per_byte), per_byte, beside, 0.0)


def _exposed(communicator: Communicator, part: np.ndarray, beside: float) -> float:
    """Compute for some seconds beside a collective; returns those that it takes besides."""
    scratch = np.ones(1 << 12)
    start = time.perf_counter()
    work = communicator.all_reduce(part, op="sum", out=part, async_op=True)
    began = time.perf_counter()
    while time.perf_counter() - began < beside:
        np.add(scratch, 1.0, out=scratch)
    ended = time.perf_counter()
    work.wait()
    return began - start + time.perf_counter() - ended
