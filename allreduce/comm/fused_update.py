"""An optimizer's update where gradients are reduced: every member does its own slice, for all.

Only the members of the shared transport can do so: they reach into each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm.calls.call import Call
from allreduce.comm.communicator import Communicator
from allreduce.comm.core.transport import MappedTransport
from allreduce.comm.core.work import Work


def updates(comm: Communicator) -> bool:
    """Return whether a communicator's members can update for each other."""
    return comm.size > 1 and isinstance(comm._dispatch.transport.on_host, MappedTransport)


def update_init(
    comm: Communicator,
    gradients: NDArray[Any],
    values: NDArray[Any],
    update: _native.RuleUpdate,
    keep: object,
) -> Callable[[], Work]:
    """Prepare an update of the same arrays in every step; not a collective call.

    Each call of the returned function starts a collective: every member sums its own slice of all
    members' gradients, in their order, updates that slice of its values, and stores it in all
    members' values. Before the next call, wait for its work. The sums are not returned.

    Args:
        comm: One that `updates`.
        gradients: In symmetric memory, the same on all members.
        values: The same, with their length and dtype. Must not be read until the work is done.
        update: The function that updates a slice.
        keep: The owner of the update's memory.
    """
    return _prepared(comm, "update", update.rule, (gradients, values), update, keep)


def sum_init(comm: Communicator, gradients: NDArray[Any]) -> Callable[[], Work]:
    """Prepare the sums for a later update, which is told to `use_sums`; not a collective call.

    Each call of the returned function starts a collective: every member replaces its slice of its
    own gradients by the sums of all members'. Before the next call, wait for its work.

    Args:
        comm: One that `updates`.
        gradients: In symmetric memory, the same on all members.
    """
    update = _native.sum_update(gradients)
    return _prepared(comm, "sum", "slices", (gradients, gradients), update, None)


def _prepared(
    comm: Communicator,
    name: str,
    how: str,
    arrays: tuple[NDArray[Any], NDArray[Any]],
    update: _native.Update,
    keep: object,
) -> Callable[[], Work]:
    context = comm._dispatch.context(name)
    dtype, size = str(arrays[0].dtype), arrays[0].size
    call_text = f"{name}({dtype}[{size}], {how})"
    call = Call("all_reduce", "sum", dtype, size, None, comm._dispatch.name, call_text=call_text)
    start = _mapped(comm).bind_update(call, *arrays, update, keep)
    return comm._dispatch.prepared(context, start)


def part_of(comm: Communicator, array: NDArray[Any], member: int) -> NDArray[Any]:
    """Return what a member has where an array of symmetric memory lies here; it can be changed.

    It stays there as long as the array that is returned, whatever becomes of the communicator.

    Args:
        comm: One that `updates`, which has made the memory.
        array: Contiguous.
        member: Whose.
    """
    part = _mapped(comm).part_of(array, member)
    return part.view(array.dtype).reshape(array.shape)


def _mapped(comm: Communicator) -> MappedTransport:
    transport = comm._dispatch.transport.on_host
    assert isinstance(transport, MappedTransport), "callers ask `updates` first"
    return transport
