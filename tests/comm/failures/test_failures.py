"""A communicator that ended names the dead, leaving, timed-out or stopped member on all others."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator
from allreduce.comm.transports import native
from allreduce.events import logger
from tests.harness import settle_threads, shorten


def test_a_dead_communicator_says_so_and_why() -> None:
    def member(comm: Communicator) -> str:
        with pytest.raises(errors.MismatchError) as first:
            comm.all_reduce(np.ones(3 + comm.rank))
        for again in (lambda: comm.barrier(), lambda: comm.all_reduce(np.ones(3))):
            with pytest.raises(errors.ClosedError, match="dead since") as second:
                again()
            assert str(first.value) in str(second.value)
            assert str(second.value).endswith("; close() it before you make a new one")
            assert second.value.finding == first.value.finding  # for levels of another transport
        comm.close()
        with pytest.raises(errors.ClosedError, match="is closed"):
            comm.all_reduce(np.ones(3))
        return "fine"

    assert settle_threads(member, 2) == ["fine", "fine"]


def test_started_works_fail_with_the_communicator() -> None:
    started = threading.Barrier(3)

    def member(comm: Communicator) -> str:
        if comm.rank == 2:  # without it the works cannot complete
            started.wait()
            return "fine"
        work = comm.all_reduce(np.ones(100000), async_op=True)
        started.wait()
        if comm.rank == 0:
            comm.abort("enough")
        with pytest.raises((errors.PeerLostError, errors.ClosedError), match="enough"):
            work.wait()
        return "fine"

    assert settle_threads(member, 3) == ["fine"] * 3


def test_abort_is_named_with_its_reason() -> None:
    def member(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("the disk is full")
        comm.barrier()

    outcomes = settle_threads(member, 3)
    assert isinstance(outcomes[1], errors.ClosedError)
    for index in (0, 2):
        assert isinstance(outcomes[index], errors.PeerLostError)
        assert "replica 1 (rank 0) aborted the communicator: the disk is full" in str(
            outcomes[index]
        )


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize(
    "reason", ["he typed KeyboardInterrupt", "\x01timeout at last", "\x08", ""]
)
def test_what_an_abort_is_does_not_depend_on_the_words_of_its_reason(
    reason: str, interrupted: bool
) -> None:
    def member(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort(reason, interrupted=interrupted)
        comm.barrier()

    outcome = settle_threads(member, 2)[0]
    assert isinstance(outcome, errors.PeerLostError), repr(outcome)
    assert outcome.interrupted == interrupted
    assert str(outcome).endswith(f"replica 1 (rank 0) aborted the communicator: {reason}")


def test_a_long_reason_is_cut_between_characters() -> None:
    def member(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("x" + "\u00e9" * 100_000)
        comm.barrier()

    outcomes = settle_threads(member, 2)
    assert isinstance(outcomes[0], errors.PeerLostError)
    kept = str(outcomes[0]).partition("aborted the communicator: x")[2]
    assert set(kept) == {"\u00e9", "\u2026"}
    assert 120 <= len(kept) <= 130


def test_a_long_reason_is_cut_between_words_and_shows_it() -> None:
    reason = "".join(f"word{number} " for number in range(100))

    def member(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort(reason)
        comm.barrier()

    told = str(settle_threads(member, 2)[0]).partition("aborted the communicator: ")[2]
    assert told.endswith("\u2026")
    assert reason.startswith(f"{told[:-1]} ")
    assert len(told) > 230


def test_one_that_left_normally_is_reported_as_that() -> None:
    def member(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            comm.close()
        else:
            comm.all_reduce(np.ones(10))

    first, second, third = settle_threads(member, 3)
    assert second is None
    for outcome in (first, third):
        assert isinstance(outcome, errors.PeerLostError)
        assert "replica 1 (rank 0)" in str(outcome)
        assert "left normally" in str(outcome)


def test_leaving_after_the_last_call_disturbs_nobody() -> None:
    def member(comm: Communicator) -> float:
        for _ in range(20):
            result = comm.all_reduce(np.ones(200001))
        comm.close()
        return float(result[-1])

    for _ in range(5):
        assert settle_threads(member, 3) == [3.0, 3.0, 3.0]


def test_close_completes_what_was_started() -> None:
    outs = [np.zeros(300000) for _ in range(2)]

    def member(comm: Communicator) -> None:
        comm.all_reduce(np.ones(300000), out=outs[comm.rank], async_op=True)
        comm.close()

    assert settle_threads(member, 2) == [None, None]
    assert all((out == 2).all() for out in outs)


def test_a_timeout_names_the_missing_member_its_last_call_and_the_time() -> None:
    over = threading.Event()

    def member(comm: Communicator) -> None:
        comm.broadcast(np.ones(3), root=1)
        shorten(comm, 0.3)
        if comm.rank == 1:
            over.wait(25)
        try:
            comm.all_reduce(np.ones(10))
        finally:
            over.set()

    first, second, third = settle_threads(member, 3)
    assert isinstance(second, errors.TimeoutError)
    for outcome in (first, third):
        assert isinstance(outcome, errors.TimeoutError)
        assert "gave up all_reduce(float64[10], op='sum') #1" in str(outcome)
        assert "replica 1 (rank 0) made its last call, broadcast(float64[3], root=1) #0" in str(
            outcome
        )
        assert "is alive" in str(outcome)
    assert "after 0.3 s" in str(first) + str(third)


def test_a_work_has_a_timeout_of_its_own() -> None:
    over = threading.Event()

    def member(comm: Communicator) -> float:
        start = time.monotonic()
        if comm.rank == 1:
            over.wait(25)
            return 0.0
        with pytest.raises(
            errors.TimeoutError, match=r"after 0\.2 s: replica 1 \(rank 0\) has made"
        ):
            comm.all_reduce(np.ones(10), async_op=True).wait(timeout=0.2)
        over.set()
        return time.monotonic() - start

    waited = settle_threads(member, 2, comm_timeout=60)[0]
    assert isinstance(waited, float)
    assert 0.2 <= waited < 25


def test_a_long_wait_is_reported_once_before_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "WARN_SECONDS", 0.2)
    said: list[str] = []
    warned = threading.Event()
    handler = logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        if "replica 0 (rank 0) has waited" in record.getMessage():  # the other one may, too
            said.append(record.getMessage())
            warned.set()

    monkeypatch.setattr(handler, "emit", emit)

    def member(comm: Communicator) -> float:
        if comm.rank == 1:
            warned.wait(25)
            time.sleep(0.4)  # for a second warning
        return float(comm.all_reduce(np.ones(10))[0])

    logger.addHandler(handler)
    try:
        assert settle_threads(member, 2) == [2.0, 2.0]
    finally:
        logger.removeHandler(handler)
    (text,) = said
    assert "has waited 0.2 s in all_reduce(float64[10], op='sum') #0: " in text
    assert "replica 1 (rank 0) has made no call yet" in text


def test_absurd_symmetric_memory_is_refused_on_all_members() -> None:
    def member(comm: Communicator) -> float:
        for shape in (1 << 45, (1 << 58,)):
            with pytest.raises(errors.OutOfMemoryError):
                comm.empty(shape, "float32")
        return float(comm.all_reduce(np.ones(3))[0])  # it is still alive

    assert settle_threads(member, 2) == [2.0, 2.0]


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_a_missing_member_that_waits_for_a_message_is_said_to(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    monkeypatch.setattr(native, "_ANNOUNCE_SECONDS", 0.1)
    receives = threading.Event()

    def member(comm: Communicator) -> None:
        if comm.rank == 0:
            receives.set()
            comm.recv(np.zeros(3), source=2)
        receives.wait(25)
        shorten(comm, 2)  # the recv has begun, and is announced, by then
        comm.barrier()

    for outcome in settle_threads(member, 3):
        assert isinstance(outcome, errors.TimeoutError)
        assert "gave up barrier" in str(outcome)
        expected = "replica 0 (rank 0) has made no call yet, and waits in a recv for replica 2"
        assert expected in str(outcome)


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_who_comes_late_is_told_of_the_call_that_a_member_left(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)

    found = threading.Event()

    def member(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 2:
            comm.close()
            return
        if comm.rank == 1:
            found.wait(25)
            while not comm.dead:  # the other one tells it
                time.sleep(0.001)
            comm.broadcast(1)  # is not the call in which the other found out
        try:
            comm.all_reduce(np.ones(3))
        finally:
            found.set()

    outcomes = settle_threads(member, 3)
    for outcome in outcomes[:2]:
        assert isinstance(outcome, errors.PeerLostError), outcomes
        assert "while others were in all_reduce(float64[3], op='sum') #1" in str(outcome)
