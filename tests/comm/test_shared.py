"""The shared transport, by threads and by processes: one class of tests for both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comm.cases import WHERE
from tests.comm.pool import ProcessPool, Runner, in_threads

LONG = [pytest.param(size, marks=pytest.mark.torture) for size in (4, 7)]


class Contract:
    """What holds for any ranks of any transport; `run` is made by the subclass."""

    @pytest.mark.parametrize("where", WHERE)
    def test_every_length(self, run: Runner, where: str) -> None:
        run("every_length", where)

    @pytest.mark.parametrize("where", WHERE)
    def test_every_operator_and_type(self, run: Runner, where: str) -> None:
        run("every_pair", where)

    @pytest.mark.torture
    @pytest.mark.parametrize("where", WHERE)
    def test_every_operator_type_and_length(self, run: Runner, where: str) -> None:
        run("every_pair_and_length", where)

    def test_pairs_that_make_no_sense(self, run: Runner) -> None:
        run("nonsense")

    @pytest.mark.parametrize("where", WHERE)
    @pytest.mark.parametrize(
        "case", ["rooted", "into_out", "everybody_to_everybody", "unequal", "unequal_exchange"]
    )
    def test_exchange(self, run: Runner, case: str, where: str) -> None:
        run(case, where)

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

    def test_sums_in_member_order_to_the_bit(self, run: Runner) -> None:
        """As NumPy adds them, one after the other: of threads and of processes alike."""
        private, symmetric = run("bits", "private"), run("bits", "symmetric")
        assert all(digests == private[0] for digests in (*private, *symmetric))

    @pytest.mark.parametrize(
        "case",
        [
            "slices",
            "in_flight",
            "prepared",
            "planned",
            "dropped",
            "numbers",
            "layouts",
            "many_small",
            "freed",
        ],
    )
    def test_case(self, run: Runner, case: str) -> None:
        run(case)
        run(case)  # what is made lazily is there now


@pytest.mark.parametrize("run", [1, 2, 3, *LONG], indirect=True)
class TestThreads(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, request: pytest.FixtureRequest) -> Runner:
        return in_threads(request.param)


@pytest.mark.parametrize("run", [2, 3, *LONG], indirect=True)
class TestProcesses(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, request: pytest.FixtureRequest) -> Iterator[Runner]:
        pool = ProcessPool(request.param)
        yield pool.run
        assert pool.close() == [0] * request.param
