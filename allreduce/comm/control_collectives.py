"""Collectives that the library itself makes, between the calls of a program.

Each has a purpose: a short text for errors, equal on all members. It never pairs with a call of the
program or with another purpose, even if the arrays are alike: members at different places get a
`MismatchError` instead of each other's data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.comm import objects
from allreduce.comm.arguments.checks import Options
from allreduce.comm.calls.call import Array
from allreduce.comm.communicator import Communicator
from allreduce.comm.core.work import Work


def exchange(
    comm: Communicator, purpose: str, mine: Array, counts: Sequence[int] | None = None
) -> Array:
    """Gather an array of every member's; a collective call.

    Args:
        mine: `(n, ...)`, of one shape on all members, or `(counts[rank], ...)`.
        counts: Every member's number of rows, if they differ.

    Returns:
        `(members, n, ...)`; with counts `(sum(counts), ...)`.

    Raises:
        MismatchError: A member makes another call.
    """
    options = Options(counts=counts, call_text=f"exchange({purpose})")
    found = np.asarray(_call(comm, "all_gather", mine, options))
    return found if counts is not None else found.reshape(comm.size, *mine.shape)


def begin_exchange(comm: Communicator, purpose: str, mine: Array) -> Work:
    """Start an `exchange`; the work's result is `(members * n, ...)`."""
    options = Options(call_text=f"exchange({purpose})")
    work: Work = _call(comm, "all_gather", mine, options, async_op=True)
    return work


def exchange_plain(comm: Communicator, purpose: str, mine: Any) -> list[Any]:
    """Gather every member's plain data, as `all_gather_object` does; a collective call.

    Raises:
        MismatchError: A member makes another call.
    """
    context = comm._dispatch.context("exchange")
    calls = functools.partial(objects.all_gather_object, comm._dispatch, context, mine, purpose)
    return comm._dispatch.compound(context, calls)


def total(comm: Communicator, purpose: str, mine: Array) -> Array:
    """Add up an array of every member's, of one shape and type on all; a collective call.

    Raises:
        MismatchError: A member makes another call.
    """
    options = Options("sum", call_text=f"total({purpose})")
    return np.asarray(_call(comm, "all_reduce", mine, options))


def adopt(comm: Communicator, purpose: str, array: Array) -> None:
    """Give every member's array the values of member 0's; a collective call.

    Raises:
        MismatchError: A member makes another call.
    """
    _call(comm, "broadcast", array, Options(root=0, call_text=f"adopt({purpose})"), array)


def _call(
    comm: Communicator,
    collective: str,
    x: Array,
    options: Options,
    out: Any = None,
    async_op: bool = False,
) -> Any:
    start = functools.partial(comm._dispatch.start, collective, x, options, out)
    return comm._dispatch.call(start, async_op)
