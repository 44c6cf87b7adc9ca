"""Why members that meet for a group cannot go on, in the words of whoever finds out first."""

from __future__ import annotations

from collections.abc import Mapping

from allreduce.cluster import World
from allreduce.comm.failures import advice
from allreduce.comm.gathering_notes import Failure, Wanted
from allreduce.errors import AllreduceError, MismatchError, PeerLostError, TimeoutError

_CLASSES: dict[str, type[AllreduceError]] = {
    "mismatch": MismatchError,
    "timeout": TimeoutError,
    "lost": PeerLostError,
}
COME = "all of these ranks have to make it, and name them in this order"
_SAME_ORDER = "name the ranks of a group in the same order on all of them"
_SAME_TRANSPORT = "name the same transport on all of them"
_ORDER = "every rank must make its groups in the same order"
_GONE = 0  # stands for the turn of one that has left; those of waits begin with 1


def in_circle(world: World, circle: Mapping[int, Wanted]) -> Failure:
    """Say who waits for whom, where, and how to mend it.

    Args:
        world: The members.
        circle: What each waits for, before the next, for whom it waits.
    """
    ranks = list(circle)
    following = [*ranks[1:], ranks[0]]
    waits = ", ".join(
        f"{world.called(rank)} waits in {wanted} for {world.called(other)}"
        for (rank, wanted), other in zip(circle.items(), following, strict=True)
    )
    same = len({frozenset(one.ranks) for one in circle.values()}) == 1
    mend = _SAME_ORDER if same else _ORDER
    turns = tuple((rank, wanted.turn) for rank, wanted in circle.items())
    keys = tuple(
        f"{wanted.key}/{place}"
        for wanted, other in zip(circle.values(), following, strict=True)
        for place in ("all", other)
    )
    return Failure("mismatch", f"groups differ: {waits}; {mend}", turns, keys)


def other_transports(world: World, wanted: Mapping[int, Wanted]) -> Failure:
    """Say which two members name different transports."""
    made = ", but ".join(f"{world.called(rank)} makes {wanted[rank]}" for rank in sorted(wanted))
    turns = tuple((rank, one.turn) for rank, one in wanted.items())
    return Failure("mismatch", f"groups differ: {made}; {_SAME_TRANSPORT}", turns)


def too_late(world: World, wanted: Wanted, absent: str, seconds: float) -> Failure:
    """Say who gave up, and for whom this waited."""
    story = (
        f"{world.called()} gave up {wanted} after {seconds:g} s: {absent} did not come; {COME}; "
        f"{advice(absent)}"
    )
    return Failure("timeout", story, ((world.rank, wanted.turn),))


def interrupted(world: World, wanted: Wanted, error: BaseException) -> Failure:
    """Say who came, and went away before the others did."""
    story = f"{world.called()} left {wanted} by {type(error).__name__}; {COME}"
    return Failure("lost", story, ((world.rank, wanted.turn),))


def has_left(world: World, rank: int, wanted: Wanted) -> Failure:
    """Say who will not come any more."""
    story = (
        f"{member(world, rank)} left normally, by close() or the end of its program, before it "
        f"came to {wanted}; {COME}"
    )
    return Failure("lost", story, ((rank, _GONE),))


def error(where: str, failure: Failure, me: str) -> AllreduceError:
    """Say a failure as the error of the member that is called `me`."""
    return _CLASSES[failure.kind](f"{where}: {failure.story.removeprefix(f'{me} ')}")


def member(world: World, rank: int) -> str:
    """Name a member, with its process."""
    found = world.members[rank]
    return f"{world.called(rank)} (process {found.pid} on {found.host})"
