"""Exchanges of ranks between steps, with a late rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from allreduce.comm import Communicator, Work, replica_communicators
from allreduce.errors import AllreduceError, MismatchError
from allreduce.graph.consistency import rank_exchange
from tests.harness import run_threads, world_of_one

DEADLINE = 25  # seconds that members may take to meet


@contextlib.contextmanager
def communicators(size: int, timeout: float = 20) -> Iterator[list[Communicator]]:
    """Give members that meet in steps, beside those that `run_threads` makes."""
    made = replica_communicators(world_of_one(), size, name="steps", timeout=timeout)
    try:
        yield made
    finally:
        for each in made:
            each.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_exchange, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(rank_exchange, "_LISTEN_SECONDS", 0.01)


def test_one_that_comes_late_to_a_step_ends_the_others_wait_though_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_at, waits, told = rank_exchange._poll, threading.Barrier(3), threading.Barrier(3)

    def looks(works: Sequence[Work]) -> bool:
        waits.wait(DEADLINE)  # all of the rank's exchanges have begun
        return look_at(works)

    monkeypatch.setattr(rank_exchange, "_poll", looks)

    def member(comm: Communicator) -> str:
        try:
            if comm.rank == 1:
                waits.wait(DEADLINE)
                steps[1].all_reduce(np.ones(3))
            else:
                rank_exchange.exchange_between_steps(comm, [steps[comm.rank]], "this", np.ones(2))
        except MismatchError as error:
            told.wait(DEADLINE)  # it has not left
            return str(error)
        return ""

    with communicators(3) as steps:
        messages = run_threads(member, 3)
    for message in messages:
        assert "all_reduce(float64[3], op='sum') at" in message
        assert "exchange(this) at" in message


def _messages(
    listening: tuple[int, ...], timeout: float, instead: Callable[[Communicator], object]
) -> list[str]:
    """Return what ranks 0, 2 and 3 of 4 raise from an exchange to which rank 1 does not come.

    Args:
        listening: Members that wait among ranks with a listener, without looking at all
            communicators.
        timeout: Their timeout in seconds.
        instead: Rank 1's action with its communicator of steps.
    """
    look_at, here = rank_exchange._poll, threading.local()
    begun, told = threading.Barrier(4), threading.Barrier(4)

    def looks(works: Sequence[Work]) -> bool:
        begun.wait(DEADLINE)  # a call that is not there yet would be missed, too
        time.sleep(here.rank / 50)  # they do not hear of an end at once
        return here.rank not in listening and look_at(works)

    def member(comm: Communicator) -> str:
        here.rank = comm.rank
        try:
            if comm.rank == 1:
                begun.wait(DEADLINE)
                instead(steps[1])
            else:
                rank_exchange.exchange_between_steps(comm, [steps[comm.rank]], "this", np.ones(2))
        except AllreduceError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            told.wait(DEADLINE)  # it has not left
        return ""

    with pytest.MonkeyPatch.context() as patch, communicators(4, timeout) as steps:
        patch.setattr(rank_exchange, "_POLL_SECONDS", 9.0)
        patch.setattr(rank_exchange, "_poll", looks)
        found = run_threads(member, 4, comm_timeout=timeout)
    return [found[0], *found[2:]]


@pytest.mark.parametrize("listening", [(0,), (0, 2, 3)])
def test_all_hear_who_did_not_come_whichever_exchange_ends_first(
    listening: tuple[int, ...],
) -> None:
    for message in _messages(listening, 0.3, lambda _: None):
        assert message.startswith("TimeoutError: ")
        assert "gave up exchange(this)" in message
        assert "s: replica 1 (rank 0) has made no call yet" in message


@pytest.mark.parametrize("listening", [(), (0, 2, 3)])
def test_all_hear_why_the_steps_have_ended_whoever_hears_of_it_first(
    listening: tuple[int, ...],
) -> None:
    def fail(steps: Communicator) -> None:
        time.sleep(0.01)
        steps.abort("an error of its own")

    for message in _messages(listening, 20, fail):
        assert message.startswith("PeerLostError: ")
        assert message.endswith("replica 1 (rank 0) aborted the communicator: an error of its own")


def test_one_that_comes_late_to_the_exchange_is_waited_for() -> None:
    def member(comm: Communicator) -> float:
        if comm.rank == 1:
            time.sleep(0.05)
        found = rank_exchange.exchange_between_steps(comm, [steps[comm.rank]], "this", np.ones(2))
        assert (found.shape, steps[comm.rank].all_reduce(1), comm.all_reduce(1)) == ((2, 2), 2, 2)
        return float(found.sum())

    with communicators(2) as steps:
        assert run_threads(member, 2) == [4, 4]
