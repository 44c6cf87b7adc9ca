"""The bytes that a hierarchical communicator sends between hosts, compared with its plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.comm.calls.call import MESSAGES, Array, Call, item_bytes
from allreduce.comm.core.work import Work
from allreduce.comm.transports.hierarchical.chains import make_chains
from allreduce.comm.transports.hierarchical.steps import Step
from allreduce.comm.transports.hierarchical.transport import HierarchicalTransport

SMALL, MEDIUM, LARGE = 100, 20_000, 600_000  # elements: with the posts; one chunk; several


def carrier(comm: Communicator) -> str:
    return comm.transport


def whereabouts(comm: Communicator) -> tuple[str, int, int]:
    return comm.transport, comm.local_rank, comm.local_size


def crossings(comm: Communicator) -> list[tuple[str, int, int]]:
    """Make calls of every collective; return the planned and the sent bytes of each."""
    transport = comm._dispatch.transport
    assert isinstance(transport, HierarchicalTransport)
    made: list[Call] = []
    start = transport.start

    def noted(call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]) -> Work:
        made.append(call)
        return start(call, x, out, result)

    transport.start = noted  # type: ignore[method-assign]
    found = []
    for name, call in [("barrier", comm.barrier), *_calls(comm)]:
        comm.barrier()
        made.clear()
        before = _crossed(transport)
        call()
        crossed = _crossed(transport) - before
        found.append((name, sum(_planned(transport, one) for one in made), crossed))
    transport.start = start  # type: ignore[method-assign]
    return found


def _mates(transport: HierarchicalTransport) -> tuple[int, ...]:
    return transport.layout.hosts[transport.layout.places[transport.index][0]]


def _crossed(transport: HierarchicalTransport) -> int:
    """Return the bytes of data that this member has sent to other hosts."""
    sent = transport._control._member.payload_bytes()
    total = sum(count for member, count in enumerate(sent) if member not in _mates(transport))
    across: Any = transport._levels["across"].transport if "across" in transport._levels else None
    return total if across is None else total + sum(across._member.payload_bytes())


def _planned(transport: HierarchicalTransport, call: Call) -> int:
    """Return the bytes that this member sends to other hosts in a call, by its plan."""
    mates = _mates(transport)
    if call.collective in MESSAGES:
        abroad = call.collective == "send" and call.root not in mates
        return call.count * item_bytes(call.dtype) if abroad else 0
    total = 0
    for chain in make_chains(call, transport.layout, transport.index):
        for step in chain.steps:
            if isinstance(step, Step) and step.level == "across":
                total += transport._plan_part("across", step.call).sent or 0
            elif isinstance(step, Step) and step.level == "every":
                counts = step.call.counts or (step.call.count,) * transport.layout.size
                others = [i for i in range(transport.layout.size) if i not in mates]
                if call.collective == "gather":  # the own share, to the root
                    counts = (counts[transport.index],) * transport.layout.size
                    others = [i for i in others if i == call.root]
                elif call.collective == "scatter" and call.root != transport.index:
                    others = []
                total += sum(counts[i] for i in others) * item_bytes(step.call.dtype)
    return total


def _message(comm: Communicator, x: Array) -> None:
    """Send to the next member, which is on another host for some, and get from the one before."""
    sent = comm.send(x, (comm.rank + 1) % comm.size, async_op=True)
    comm.recv(np.empty_like(x), (comm.rank - 1) % comm.size)
    sent.wait()


def _calls(comm: Communicator) -> Iterator[tuple[str, Callable[[], Any]]]:
    size, rank = comm.size, comm.rank
    for n in (SMALL, MEDIUM, LARGE):
        x, whole = np.ones(n, "float32"), np.ones(n // size * size, "float32")
        share = np.ones(n // size, "float32")
        counts = [n // size + member for member in range(size)]
        mine, cut = np.ones(counts[rank], "float32"), np.ones(sum(counts), "float32")
        root = n % size
        rows: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(comm.all_reduce, x),
            "all_reduce float16": partial(comm.all_reduce, x.astype("float16")),
            "reduce": partial(comm.reduce, x, root=root),
            "broadcast": partial(comm.broadcast, x, root=root),
            "reduce_scatter": partial(comm.reduce_scatter, whole),
            "all_gather": partial(comm.all_gather, share),
            "gather": partial(comm.gather, share, root=root),
            "all_to_all": partial(comm.all_to_all, whole),
            "scatter": partial(comm.scatter, whole if rank == root else None, root=root),
            "unequal reduce_scatter": partial(comm.reduce_scatter, cut, counts=counts),
            "unequal all_gather": partial(comm.all_gather, mine, counts=counts),
            "unequal gather": partial(comm.gather, mine, counts=counts, root=root),
            "unequal scatter": partial(
                comm.scatter, cut if rank == root else None, counts=counts, root=root
            ),
            "unequal all_to_all": partial(comm.all_to_all, cut, counts=counts),
            "message": partial(_message, comm, x),
        }
        yield from ((f"{name} {n}", call) for name, call in rows.items())
