"""Messages over tcp: by tag and source, in their sender's order, to oneself, or not as expected."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.errors import MismatchError
from tests.comm.cases.tcp_cases import ANY, new_output, run, start
from tests.harness import run_threads, settle_threads


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")


@pytest.mark.parametrize("connections", ["1", "3"])
def test_messages_by_tag_and_source(connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TCP_CONNECTIONS", connections)

    def member(comm: Communicator) -> None:
        lengths = (0, 5, 1000, 2000, 700001)
        others = [other for other in range(comm.size) if other != comm.rank]
        works = []
        for other, (tag, length) in itertools.product(others, enumerate(lengths)):
            x = np.full(length, comm.rank * 10 + tag, np.int64)
            works.append(start(comm, "send", x, None, root=other, tag=tag))
        for tag, other in itertools.product((4, 0, 3, 1, 2), others):
            out = new_output(lengths[tag], "int64")
            run(comm, "recv", None, out, root=other, tag=tag)
            assert (out == other * 10 + tag).all()
        for work in works:
            work.wait()

    run_threads(member, 3)


def test_messages_of_any_source_and_tag_come_in_their_senders_order() -> None:
    def member(comm: Communicator) -> None:
        if comm.rank:
            for index in range(150):  # more than may be under way unaccepted
                value = np.array([comm.rank, index])
                run(comm, "send", value, None, root=0, tag=index % 3)
            return
        seen: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(300):
            rank, index = run(comm, "recv", None, new_output(2, "int64"), root=ANY, tag=ANY)
            seen[int(rank)].append(int(index))
        assert seen == {1: list(range(150)), 2: list(range(150))}

    run_threads(member, 3)


def test_messages_to_oneself() -> None:
    def member(comm: Communicator) -> None:
        for length in (3, 100000):
            x = np.full(length, comm.rank + 5.0)
            first = start(comm, "send", x, None, root=comm.rank, tag=1)
            assert (
                run(comm, "recv", None, new_output(length, "float64"), root=ANY, tag=1) == x
            ).all()
            first.wait()
            later = start(comm, "recv", None, new_output(length, "float64"), root=comm.rank, tag=2)
            run(comm, "send", x, None, root=comm.rank, tag=2)
            assert (later.wait() == x).all()

    run_threads(member, 2)


def test_messages_that_do_not_fit_are_a_mismatch_of_both_calls() -> None:
    def member(comm: Communicator) -> None:
        if comm.rank == 0:
            run(comm, "send", np.ones(4), None, root=1, tag=7)
            run(comm, "barrier", np.ones(0), None, dtype="none")
        else:
            run(comm, "recv", None, new_output(5, "float64"), root=0, tag=7)

    for outcome in settle_threads(member, 2):
        assert isinstance(outcome, MismatchError), outcome
        assert "a message differs: " in str(outcome)
        assert "send(float64[4], dest=1, tag=7) at " in str(outcome)
        assert "recv(float64[5], source=0, tag=7) at " in str(outcome)
