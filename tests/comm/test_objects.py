"""Plain Python data between members: results, and errors on all members."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.errors import AllreduceError, UsageError
from tests.harness import run_threads, settle_threads

DATA = {"a": [1, 2.5, None, True], 3: b"bytes", "nested": {"b": "text"}}
NOT_PLAIN: tuple[Any, ...] = (
    *({1, 2}, {(1, 2): 3}, 1 << 64, "\ud800", object()),
    *(np.zeros(2), np.complex64(1), np.datetime64("2001-01-01"), np.longdouble(1)),
)


def test_plain_data_arrives() -> None:
    def member(comm: Communicator) -> Any:
        mine = DATA if comm.rank == 1 else [comm.rank]
        return (
            comm.broadcast_object(mine, root=1),
            comm.gather_object(mine, root=1),
            comm.all_gather_object(mine),
        )

    every = [[0], DATA]
    assert run_threads(member, 2) == [(DATA, None, every), (DATA, every, every)]


def test_numbers_of_numpy_arrive_as_pythons() -> None:
    value = [
        *(np.float16(0.5), np.float32(2.5), np.float64(0.1), np.bool_(True)),
        *({np.int64(3): [np.int8(-1), {"deep": np.uint64(2**64 - 1)}]},),
    ]
    arrived = [0.5, 2.5, 0.1, True, {3: [-1, {"deep": 2**64 - 1}]}]

    def member(comm: Communicator) -> Any:
        mine = value if comm.rank == 1 else np.int64(comm.rank)
        return (
            comm.broadcast_object(mine, root=1),
            comm.gather_object(mine, root=1),
            comm.all_gather_object(mine),
        )

    zero, one = run_threads(member, 2)
    assert repr(zero) == repr((arrived, None, [0, arrived]))  # which tells types, too
    assert repr(one) == repr((arrived, [0, arrived], [0, arrived]))


@pytest.mark.parametrize("value", NOT_PLAIN, ids=range(len(NOT_PLAIN)))
@pytest.mark.parametrize("name", ["broadcast_object", "gather_object", "all_gather_object"])
def test_what_cannot_be_carried_fails_on_all_and_leaves_them_alive(name: str, value: Any) -> None:
    def member(comm: Communicator) -> str:
        options = {} if name == "all_gather_object" else {"root": 1}
        with pytest.raises(UsageError) as caught:
            getattr(comm, name)(value if comm.rank == 1 else 5, **options)
        assert caught.value.__cause__ is None  # the message has told it
        assert comm.all_reduce(1) == 3
        return str(caught.value)

    said = run_threads(member, 3)
    assert f"replica 1 (rank 0): {name} carries numbers" in said[1]
    for text in (said[0], said[2]):
        assert (
            text == said[1]
            if name == "broadcast_object"
            else "replica 1 (rank 0) has passed" in text
        )


@pytest.mark.parametrize("name", ["broadcast_object", "gather_object"])
def test_a_root_that_is_none_is_refused_in_the_callers_words(name: str) -> None:
    for error in settle_threads(lambda comm: getattr(comm, name)(1, root=7), 2):
        assert isinstance(error, AllreduceError)
        assert f"{name} got root=7; expected a rank from 0 to 1" in str(error)
