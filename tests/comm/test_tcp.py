"""The tcp transport, by threads and by processes: what holds for any transport, and its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comm.pool import ProcessPool, Runner, in_threads

LONG = [pytest.param(size, marks=pytest.mark.torture) for size in (4, 7)]


class Contract:
    """What holds for any ranks of tcp; `run` is made by the subclass."""

    def test_every_length(self, run: Runner) -> None:
        run("every_length", "private")

    def test_every_operator_and_type(self, run: Runner) -> None:
        run("every_pair", "private")

    @pytest.mark.torture
    def test_every_operator_type_and_length(self, run: Runner) -> None:
        run("every_pair_and_length", "private")

    def test_pairs_that_make_no_sense(self, run: Runner) -> None:
        run("nonsense")

    @pytest.mark.parametrize(
        "case", ["rooted", "into_out", "everybody_to_everybody", "unequal", "unequal_exchange"]
    )
    def test_exchange(self, run: Runner, case: str) -> None:
        run(case, "private")

    @pytest.mark.parametrize(
        "case",
        [
            "started",
            "threads_in_order",
            "threads_in_turn",
            "many_as_one",
            "lists_into_some",
            "plain_data",
            "scaled",
            "foreign",
        ],
    )
    def test_convenience(self, run: Runner, case: str) -> None:
        run(case)

    @pytest.mark.parametrize(
        "case", ["in_flight", "prepared", "planned", "dropped", "numbers", "layouts", "many_small"]
    )
    def test_case(self, run: Runner, case: str) -> None:
        run(case)
        run(case)  # what is made lazily is there now


@pytest.mark.parametrize("run", [1, 2, 3, *LONG], indirect=True)
class TestThreads(Contract):
    @pytest.fixture
    def run(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner:
        monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")
        return in_threads(request.param)


@pytest.mark.parametrize("run", [2, 3, *LONG], indirect=True)
class TestProcesses(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, request: pytest.FixtureRequest) -> Iterator[Runner]:
        pool = ProcessPool(request.param, "tcp")
        yield pool.run
        assert pool.close() == [0] * request.param
