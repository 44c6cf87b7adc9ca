"""The leader's state, without sockets or clocks: waiting members, and their messages."""

from __future__ import annotations

from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.leader.group import Group
from allreduce.cluster.store import VICTIM
from allreduce.cluster.world import Member


class Harness:
    """A group, and the messages sent to each member."""

    def __init__(self, size: int, present: int | None = None) -> None:
        self.group = Group(size)
        self.sent: dict[int, list[pb.ToMember]] = {}
        for rank in range(size if present is None else present):
            self.enter(rank)

    def enter(self, rank: int) -> None:
        self.sent[rank] = []
        self.group.enter(Member(rank, "host", 100 + rank), self.sent[rank].append)

    def get(self, rank: int, key: str, request: int = 1) -> pb.FromMember:
        message = pb.FromMember(request=request, get=pb.Get(key=key))
        self.group.handle(rank, message)
        return message

    def put(self, rank: int, key: str, value: bytes) -> None:
        self.group.handle(rank, pb.FromMember(request=9, set=pb.Set(key=key, value=value)))

    def kinds(self, rank: int) -> list[str | None]:
        return [message.WhichOneof("content") for message in self.sent[rank]]


def test_get_waits_for_set() -> None:
    harness = Harness(2)
    harness.get(0, "k")
    assert harness.sent[0] == []
    harness.put(1, "k", b"v")
    assert harness.sent[0][0].value.value == b"v"
    harness.get(1, "k", 2)
    assert harness.sent[1][-1].value.value == b"v"


def test_expired_get_is_answered_once() -> None:
    harness = Harness(2)
    message = harness.get(0, "k")
    harness.group.expire(0, message)
    harness.group.expire(0, message)
    harness.put(1, "k", b"v")
    assert harness.kinds(0) == ["missing"]


def test_a_lost_member_fails_gets_and_is_named() -> None:
    harness = Harness(3)
    harness.get(0, "k", 1)
    harness.get(1, "l", 2)
    harness.group.leave(2, "it died", lost=True)
    assert harness.sent[0][0].lost.identity.rank == 2
    assert harness.sent[1][0].lost.identity.pid == 102
    harness.get(0, "other", 3)
    assert harness.sent[0][-1].lost.reason == "it died"
    assert harness.group.first_lost == 2


def test_the_first_lost_is_named_when_others_follow() -> None:
    harness = Harness(3)
    harness.group.leave(1, "it died", lost=True)
    harness.group.leave(2, "it died too", lost=True)
    harness.get(0, "k")
    assert harness.sent[0][0].lost.identity.rank == 1


def test_one_that_says_that_it_ends_for_want_of_another_is_no_culprit() -> None:
    harness = Harness(3)
    harness.put(2, VICTIM, b"")
    seen = []
    for rank in (2, 1, 0):
        harness.group.leave(rank, "it died", lost=True)
        seen.append(harness.group.culprit)
    assert seen == [None, 1, 1]
    assert harness.group.victims == {2}


def test_what_a_lost_member_had_set_stays() -> None:
    harness = Harness(2)
    harness.put(1, "k", b"v")
    harness.group.leave(1, "it died", lost=True)
    harness.get(0, "k")
    assert harness.sent[0][0].value.value == b"v"


def test_keys_go_when_all_who_used_them_have_forgotten_them_or_are_gone() -> None:
    harness = Harness(4)
    for key in ("part/a", "part/b", "party"):
        harness.put(0, key, b"")
    forget = pb.FromMember(forget=pb.Forget(prefix="part/", ranks=[0, 1, 2]))
    for rank in (0, 3, 1):  # rank 3 is none of those who use them
        harness.group.handle(rank, forget)
        harness.get(2, "part/b")
    assert harness.kinds(2) == ["value"] * 3
    harness.group.leave(2, "it died", lost=True)
    for key in ("part/a", "part/b", "party"):
        harness.get(0, key)
    assert harness.kinds(0)[-3:] == ["lost", "lost", "value"]
    harness.put(1, "part/a", b"")  # of others of that name
    harness.group.handle(0, forget)
    harness.get(0, "part/a")
    assert harness.kinds(0)[-1] == "value"


def test_a_member_that_left_fails_no_gets() -> None:
    harness = Harness(3)
    harness.get(0, "k", 1)
    harness.group.leave(2, "it left", lost=False)
    assert harness.sent[0] == []
    harness.put(1, "k", b"v")
    assert harness.kinds(0) == ["value"]
    assert harness.group.first_lost is None


def test_assembling_names_the_missing_and_frees_the_place_of_who_gave_up() -> None:
    harness = Harness(3, present=1)
    waiting = pb.FromMember(request=1, assemble=pb.Assemble())
    harness.group.handle(0, waiting)
    harness.group.expire(0, waiting)
    assert list(harness.sent[0][0].missing.ranks) == [1, 2]
    harness.group.leave(0, "it left", lost=True)
    assert harness.group.refusal(Member(0, "host", 200), 3) is None


def test_all_get_the_roll_when_the_last_one_enters() -> None:
    harness = Harness(2, present=1)
    harness.group.handle(0, pb.FromMember(request=1, assemble=pb.Assemble()))
    harness.enter(1)
    assert [m.pid for m in harness.sent[0][0].members.members] == [100, 101]


def test_refusals_say_what_is_wrong() -> None:
    harness = Harness(2)
    group = harness.group
    assert "expects 2" in (group.refusal(Member(0, "h", 1), 3) or "")
    assert "0 to 1" in (group.refusal(Member(2, "h", 1), 2) or "")
    twice = group.refusal(Member(1, "elsewhere", 7), 2) or ""
    assert "process 101 on host" in twice
    assert "process 7 on elsewhere" in twice


def test_those_who_wait_for_a_rank_whose_process_has_ended_are_told() -> None:
    harness = Harness(3, present=1)
    harness.group.handle(0, pb.FromMember(request=1, assemble=pb.Assemble()))
    harness.group.ended[1] = Member(1, "host", 101)
    harness.group.give_up()
    harness.enter(2)
    harness.group.handle(2, pb.FromMember(request=4, assemble=pb.Assemble()))
    for rank, request in ((0, 1), (2, 4)):
        (answer,) = harness.sent[rank]
        assert (answer.request, answer.lost.identity.pid) == (request, 101)
