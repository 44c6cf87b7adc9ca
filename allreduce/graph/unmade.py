"""A rank that cannot make a step tells those that can, which would wait for it.

Ranks that all fail alike, as by a mistake in what they trace, find that out and can go on.
"""

from __future__ import annotations

import time

import numpy as np

from allreduce.comm import Communicator, begin_exchange
from allreduce.errors import AllreduceError
from allreduce.graph.tracebacks import UNMADE

_TOGETHER_SECONDS = 1.0  # in which ranks that fail alike come
_LOOK_SECONDS = 0.002


def all_alike(members: list[Communicator], error: Exception) -> bool:
    """Say whether all ranks have failed to make a step, for errors of one class.

    Where another makes a different call, this one ends it: then that rank is told of both calls.

    Args:
        members: This process's, of the communicator in which the others may wait.
        error: Why this rank has no step.
    """
    purpose = f"{UNMADE}: this rank raised {type(error).__name__}"
    limit = time.monotonic() + _TOGETHER_SECONDS
    try:
        works = [begin_exchange(each, purpose, np.zeros(1, np.int8)) for each in members]
        while not all(work.done() for work in works):
            if time.monotonic() > limit:
                return False
            time.sleep(_LOOK_SECONDS)
    except AllreduceError:
        return False
    return True
