"""What ranks tell each other of the library's own accord, between the calls of a program."""

from __future__ import annotations

import functools

import numpy as np

from allreduce.comm.array import Array
from allreduce.comm.caller import Caller
from allreduce.comm.checks import Options


def exchange(comm: Caller, purpose: str, mine: Array) -> Array:
    """Gather an array of every member's; a collective call.

    It pairs with no call of a program and with no exchange for another purpose, however alike the
    arrays are: ranks that have come to different places get a `MismatchError` instead of each
    other's bits.

    Args:
        comm: Whose members take part.
        purpose: What it is for, in a few words that stand in errors; the same on all members.
        mine: `(n, ...)`, of one shape on all members.

    Returns:
        `(members, n, ...)`.

    Raises:
        MismatchError: A member makes another call.
    """
    options = Options(typed=f"exchange({purpose})")
    told = comm._call(functools.partial(comm._start, "all_gather", mine, options), False)
    return np.asarray(told).reshape(comm.size, *mine.shape)
