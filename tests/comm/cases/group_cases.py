"""Cases of groups of every transport, as functions of one member of the parent."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.cluster.leader.client import LeaderStore
from allreduce.cluster.store import LocalStore
from allreduce.comm import Communicator, world
from tests.comm.cases.collective_cases import Array


def total(comm: Communicator, value: int) -> int:
    """Reduce one number, and a large array of it."""
    result: int = comm.all_reduce(value)
    assert (comm.all_reduce(np.full(30000, value)) == result).all()
    return result


def part_of(comm: Communicator, color: int, key: int = 0) -> Communicator:
    part = comm.split(color, key)
    assert part is not None
    return part


def by_parity(comm: Communicator) -> None:
    """The even and the odd ranks, in reverse; every collective knows the new numbers."""
    ranks = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    with part_of(comm, comm.rank % 2, -comm.rank) as part:
        assert (part.size, part.rank) == (len(ranks), ranks.index(comm.rank))
        assert part.transport == comm.transport
        assert total(part, comm.rank) == sum(ranks)
        assert part.broadcast(comm.rank, root=part.size - 1) == ranks[-1]
        np.testing.assert_array_equal(part.all_gather(comm.rank), ranks)
        assert part.all_gather_object(comm.rank) == ranks
        gathered = part.gather(np.full(3000, comm.rank), root=0)
        if part.rank == 0:
            np.testing.assert_array_equal(gathered, np.repeat(ranks, 3000))
        out = np.zeros(2000, np.int64)
        part.send(np.full(2000, comm.rank), (part.rank + 1) % part.size, async_op=True)
        part.recv(out, (part.rank - 1) % part.size)
        assert (out == ranks[part.rank - 1]).all()
        memory = part.empty(1000, "int64")
        memory[:] = comm.rank
        part.all_reduce(memory, out=memory)
        assert (memory == sum(ranks)).all()
    assert total(comm, 1) == comm.size


def without_color(comm: Communicator) -> None:
    """A member without a color takes part in the split, and in none of its parts."""
    part = comm.split(None if comm.rank == 0 else 5)
    assert (part is None) == (comm.rank == 0)
    if part is not None:
        assert total(part, 1) == comm.size - 1
        part.close()
    assert comm.split(None) is None


def of_ranks(comm: Communicator) -> None:
    """Only the members of a group make it; others get None at once, or do not even call."""
    last = comm.size - 1
    if comm.rank in (0, last):
        both = [last, 0] if last else [0]
        first = comm.group(both)
        second = comm.group(both)
        assert first is not None
        assert second is not None
        assert first.rank == both.index(comm.rank)
        assert total(second, comm.rank) == total(first, comm.rank) == last
        first.close()
        assert total(second, 1) == len(both)
        second.close()
    for rank in range(comm.size):  # as torch has it: everybody makes all of them
        own = comm.group([rank])
        assert (own is None) == (rank != comm.rank)
        if own is not None:
            assert total(own, 7) == 7
            own.close()


def made_while_calls_are_under_way(comm: Communicator) -> None:
    """A waiting member does its share of calls that others must complete before they come."""
    work = comm.all_reduce(np.ones(2_000_000, np.float32), async_op=True)
    if comm.rank:
        work.wait()
    made = comm.group(range(comm.size))
    assert made is not None
    with made:
        assert total(made, 1) == comm.size
    assert (work.wait() == comm.size).all()


def nested(comm: Communicator) -> None:
    """Groups of groups of groups, which name members by numbers of their own."""
    half = part_of(comm, comm.rank * 2 // comm.size)
    again = part_of(half, half.rank % 2, -half.rank)
    alone = again.group([again.rank])
    assert alone is not None
    seen = comm.all_gather_object([half.all_gather_object(comm.rank), again.size])
    assert sum(1 / len(row[0]) for row in seen) == pytest.approx(min(2, comm.size))
    assert comm.rank in again.all_gather_object(comm.rank)
    assert alone.all_gather_object(comm.rank) == [comm.rank]
    half.close()  # what was made of it goes on
    assert total(again, 1) == again.size
    alone.close()
    again.close()


def closed_in_any_order(comm: Communicator) -> None:
    """Each member closes its groups in another order."""
    parts = [part_of(comm, comm.rank % (2 + number % 2)) for number in range(4)]
    parts.append(part_of(parts[0], 0))
    for part in parts:
        assert total(part, 1) == part.size
    for position in np.random.default_rng(comm.rank).permutation(len(parts)):
        parts[position].close()
        assert parts[position].closed
    for part in parts:
        with pytest.raises(errors.ClosedError):
            part.all_reduce(1)
    comm.barrier()


_turns = itertools.count()


def kept(comm: Communicator) -> list[str]:
    """List the keys that the store has once all members have come here; known to rank 0."""
    store = world().store
    comm.barrier()
    # Behind whatever members have said before; a name of an earlier turn would not wait for them.
    world().exchange(f"kept {next(_turns)}", b"", 20)
    keys: list[str] = []
    if isinstance(store, LocalStore):
        keys = list(store._values)
    elif comm.rank == 0:
        assert isinstance(store, LeaderStore)
        assert store._hosted is not None
        (group,) = store._hosted.groups.values()
        keys = [*group._values, *group._getting, *group._using]
    return sorted(key for key in keys if not key.startswith("kept "))


def out_of_the_store(comm: Communicator) -> None:
    """When all members have closed a group, in whatever order, nothing is left in the store."""
    gc.collect()  # what earlier cases left to the collector goes now, not halfway
    before = kept(comm)
    parts = [part_of(comm, comm.rank % (1 + number % 2)) for number in range(3)]
    for parent in (comm, parts[0]):
        whole = parent.group(range(parent.size))
        assert whole is not None
        parts.append(whole)
    parts.append(parts[-1].local)
    assert total(parts[-1], 1) == parts[-1].size
    for position in np.random.default_rng(comm.rank).permutation(len(parts)):
        parts[position].close()
    left = kept(comm)
    assert left == before, f"the store had {before}, and has {left}"


def works_across_groups(comm: Communicator) -> None:
    """Works of a parent and of its groups, waited for in an order of each member's own."""
    odd, all_again = part_of(comm, comm.rank % 2), part_of(comm, 0)
    groups = [comm, odd, all_again]
    works: list[tuple[Any, Array]] = []
    for number in range(30):
        group = groups[number % 3]
        length = (4, 60000)[number % 2]
        expected = np.full(length, number * group.size)
        works.append((group.all_reduce(np.full(length, number), async_op=True), expected))
        to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        x = np.full(20000, number + group.rank)
        works.append((group.send(x, to, number, async_op=True), np.array(None)))
        out = np.zeros(20000, np.int64)
        received = group.recv(out, source, number, async_op=True)
        works.append((received, np.full(20000, number + source)))
    for position in np.random.default_rng(comm.rank).permutation(len(works)):
        work, expected = works[position]
        np.testing.assert_array_equal(work.wait(timeout=50), expected)
    for group in groups[1:]:
        group.close()


def per_host(comm: Communicator, hosts: str = "") -> None:
    """`local` is the members of one host, `across` one of each of the same place on theirs.

    Args:
        comm: The parent.
        hosts: A letter for the host of each member; what each is told of its own without it.
    """
    hosts = hosts or "".join(comm.all_gather_object(os.environ.get("ALLREDUCE_HOST", "a")))
    mates = [rank for rank in range(comm.size) if hosts[rank] == hosts[comm.rank]]
    places = [hosts[:rank].count(hosts[rank]) for rank in range(comm.size)]
    twins = [rank for rank in range(comm.size) if places[rank] == places[comm.rank]]
    with part_of(comm, 0) as part:
        local, across = part.local, part.across
        assert part.local is local
        assert part.across is across
        for group, ranks in ((local, mates), (across, twins)):
            assert group.all_gather_object(comm.rank) == ranks
            assert group.rank == ranks.index(comm.rank)
            assert total(group, comm.rank) == sum(ranks)
            out = np.zeros(20000, np.int64)
            group.send(np.full(20000, comm.rank), (group.rank + 1) % group.size, async_op=True)
            group.recv(out, (group.rank - 1) % group.size)
            assert (out == ranks[group.rank - 1]).all()
        comm.barrier()
        across.close()
        assert part.across is not across
        across = part.across
    assert local.closed
    assert across.closed
    comm.barrier()


def forgotten(comm: Communicator) -> None:
    """Dropping a group without closing it counts as leaving; its calls end first."""
    part = part_of(comm, 0)
    if comm.rank == 0:
        del part
        gc.collect()
    comm.barrier()
    if comm.transport == "mpi":  # which goes on with what was started
        return
    part, x, freed = part_of(comm, 0), np.ones(300000), []
    for _ in range(3):
        part.barrier()
    if comm.rank == 0:
        work = part.all_reduce(x, out=x, async_op=True)
        native = getattr(work, "native", None)  # hierarchical's are several
        weakref.finalize(x, lambda: freed.append(native is None or native.failed))
        del part, work, x
        gc.collect()
        assert freed == [True] or comm.size == 1
    comm.barrier()
    if comm.rank:
        with pytest.raises(errors.PeerLostError, match=r"rank 0 \(process \d+\) left normally"):
            part.all_reduce(x)
    comm.barrier()


def many_groups(comm: Communicator, count: int | str) -> None:
    """Nothing is left of groups that were closed."""

    def held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:allreduce" in line or "/dev/zero" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mapped

    part_of(comm, comm.rank % 2).close()
    comm.barrier()
    before = held()
    for number in range(int(count)):
        with part_of(comm, comm.rank % 2, comm.rank) as part:
            assert part.all_reduce(number) == number * part.size
        del part
    comm.barrier()
    after = held()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def crosswise(comm: Communicator) -> None:
    """A member that waits in one communicator does its share of others' calls, of any transport."""
    names = {"tcp", "hierarchical", comm.transport}
    names |= {"shared"} if comm.local_size == comm.size else set()
    parts = [comm.group(range(comm.size), transport=name) for name in sorted(names)]
    x = np.ones(60_000, np.float32)
    for first, second in itertools.permutations(parts, 2):
        assert first is not None
        assert second is not None
        work = first.all_reduce(x, async_op=True)
        if comm.rank:  # which makes the second call when rank 0, in its own, has done its share
            work.wait(20)
        assert (second.all_reduce(x) == comm.size).all()
        assert (work.wait(20) == comm.size).all()
    for part in parts:
        assert part is not None
        part.close()
