"""Worlds of some members of a larger one, over a store that threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import pytest

from allreduce.cluster.store import LocalStore
from allreduce.cluster.world import Member, World
from allreduce.errors import ClosedError, TimeoutError, UsageError

T = TypeVar("T")


def worlds(hosts: str) -> list[World]:
    """Return what each of a world's members holds, one host per letter; all share a store."""
    members = tuple(Member(rank, "name", 100 + rank, host) for rank, host in enumerate(hosts))
    one = World(1, 0, len(hosts), members, "leader", "a test's", "job", b"secret", LocalStore())
    return [replace(one, rank=rank) for rank in range(len(hosts))]


def together(fn: Callable[[World], T], members: list[World]) -> list[T]:
    """Call `fn` for all members at once."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(fn, members))


def test_members_are_renumbered_and_still_known() -> None:
    four = worlds("abab")
    part = four[1].subset([3, 1], "odd")
    assert (part.rank, part.size, part.job, part.secret, part.generation) == (
        *(1, 2, "job", b"secret", 1),
    )
    assert [member.rank for member in part.members] == [0, 1]
    assert [member.world_rank for member in part.members] == [3, 1]
    assert [member.pid for member in part.members] == [103, 101]
    assert (part.local_rank, part.local_size) == (1, 2)
    nested = part.subset([1], "one")
    assert (nested.rank, nested.members[0].world_rank) == (0, 1)


def test_hosts_come_in_the_order_of_their_first_ranks() -> None:
    assert worlds("abcab")[0].hosts == ((0, 3), (1, 4), (2,))


def test_parts_of_one_name_exchange_among_themselves_alone() -> None:
    def meet(world: World) -> list[bytes]:
        part = world.subset([world.rank % 2, world.rank % 2 + 2], "parity")
        return part.exchange("who", str(world.rank).encode(), 25)

    assert together(meet, worlds("aaaa")) == [[b"0", b"2"], [b"1", b"3"]] * 2


def test_an_exchange_waits_for_the_members_and_nobody_else() -> None:
    three = worlds("aaa")
    first, second = (three[rank].subset([0, 2], "ends") for rank in (0, 2))
    passed = threading.Event()

    def enter() -> None:
        first.exchange("b", b"", 25)
        passed.set()

    waiter = threading.Thread(target=enter, daemon=True)
    waiter.start()
    assert not passed.wait(0.1)
    second.exchange("b", b"", 25)
    waiter.join(25)
    assert passed.is_set()


def test_messages_name_the_ranks_people_know() -> None:
    part = worlds("aaaaaa")[5].subset([5, 2, 4], "some")
    with pytest.raises(TimeoutError, match=r"rank 5: rank 2 did not come within 0.1 s to where"):
        part.exchange("key", b"", 0.1)


def test_closing_a_subset_closes_nothing_of_the_parent() -> None:
    (alone,) = worlds("a")
    part = alone.subset([0], "self")
    part.close()
    with pytest.raises(ClosedError, match="store of this group is closed"):
        part.store.set("key", b"")
    part.store.post("key", b"")  # is only news
    alone.store.set("key", b"value")
    assert alone.store.get("key", 1) == b"value"


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([0, 0], "expected different ranks from 0 to 2"),
        ([0, 3], "expected different ranks from 0 to 2"),
        ([-1, 0], "expected different ranks from 0 to 2"),
        ([1, 2], "rank 0 is not one of the ranks"),
        ([], "rank 0 is not one of the ranks"),
    ],
)
def test_ranks_that_make_no_group_are_refused(ranks: list[int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        worlds("aaa")[0].subset(ranks, "bad")
