"""comm.empty: members that ask for different arrays get errors, also if the bytes agree."""

from __future__ import annotations

import pytest

from allreduce.comm import Communicator
from allreduce.errors import MismatchError
from tests.harness import settle_threads

Wanted = tuple[tuple[int, ...], str]


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize(
    ("others", "mine"),
    [
        (((3,), "float32"), ((4,), "float32")),
        (((4,), "float32"), ((4,), "float64")),
        (((2, 3), "int32"), ((3, 2), "int32")),
        (((100_000,), "int8"), ((0,), "int8")),
    ],
)
def test_what_members_ask_for_is_compared(
    others: Wanted, mine: Wanted, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    errors = settle_threads(lambda comm: comm.empty(*(mine if comm.rank == 2 else others)), 3)
    for error in errors:
        assert isinstance(error, MismatchError)
        for shape, dtype in (mine, others):
            assert f"empty({shape}, dtype={dtype!r}) at" in str(error)
        assert str(error).endswith("must be equal on all ranks")


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_length_is_a_shape(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)

    def member(comm: Communicator) -> tuple[int, ...]:
        shape: tuple[int, ...] = comm.empty(3 if comm.rank else (3,)).shape
        return shape

    assert settle_threads(member, 2) == [(3,)] * 2
