"""The tests that every transport must pass: one class, subclassed per transport."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest

from tests.comm.ranks.pool import Ranks, Runner

IN_PLACES = (  # cases of ordinary memory, or of symmetric
    *("every_length", "every_pair", "rooted", "into_out", "everybody_to_everybody", "unequal"),
    "unequal_exchange",
)


def rows(*hosts: str, torture: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Have a class run on ranks of several sizes: a letter for each rank's host."""
    long = [pytest.param(one, marks=pytest.mark.torture) for one in torture]
    return pytest.mark.parametrize("run", [*hosts, *long], indirect=True)


class Contract:
    """Collectives and messages.

    Attributes:
        ranks: The ranks that make the calls.
        times: The number of runs: the second one meets lazily made state, and remains of the first.
    """

    ranks: ClassVar[Ranks]
    times: ClassVar[int] = 2

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, request: pytest.FixtureRequest) -> Iterator[Runner]:
        with cls.ranks.start(cls.ranks.transport, request.param) as run:
            assert set(run("carrier")) == {cls.ranks.transport}
            yield run

    @pytest.mark.parametrize("case", IN_PLACES)
    def test_of_arrays(self, run: Runner, case: str) -> None:
        run(case, "private")

    @pytest.mark.torture
    def test_every_operator_type_and_length(self, run: Runner) -> None:
        run("every_pair_and_length", "private")

    @pytest.mark.parametrize(
        "case",
        [
            *("nonsense", "every_type", "rounded_once", "equal_bits", "started", "many_as_one"),
            *("lists_into_some", "large", "plain_data", "scaled", "foreign"),
            *("threads_in_order", "threads_in_turn", "threads_waiting"),
        ],
    )
    def test_once(self, run: Runner, case: str) -> None:
        run(case)

    @pytest.mark.parametrize(
        "case",
        [
            *("in_flight", "prepared", "planned", "dropped", "numbers", "layouts", "many_small"),
            *("slices", "freed"),
        ],
    )
    def test_several_times(self, run: Runner, case: str) -> None:
        for _ in range(self.times):
            run(case)

    @pytest.mark.parametrize(
        "case",
        [
            *("ring", "tags", "order", "anybody", "crossing", "oneself", "many"),
            *("among_collectives", "unclaimed", "shapes", "symmetric"),
        ],
    )
    def test_messages(self, run: Runner, case: str) -> None:
        for _ in range(self.times):
            run(case)


class ContractOfProcesses(Contract):
    """The same, with cases that threads of one process cannot run: groups, other libraries."""

    @pytest.mark.parametrize(
        "case",
        [
            *("by_parity", "without_color", "of_ranks", "made_while_calls_are_under_way", "nested"),
            *("closed_in_any_order", "out_of_the_store", "works_across_groups", "per_host"),
        ],
    )
    def test_groups(self, run: Runner, case: str) -> None:
        for _ in range(self.times):
            run(case)

    @pytest.mark.parametrize("case", ["forgotten", "crosswise"])
    def test_groups_once(self, run: Runner, case: str) -> None:
        run(case)

    @pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.torture)])
    def test_nothing_is_left_of_closed_groups(self, run: Runner, count: int) -> None:
        run("many_groups", count)

    @pytest.mark.parametrize("library", ["torch", "jax"])
    def test_arrays_of_another_library(self, run: Runner, library: str) -> None:
        if find_spec(library) is None:
            pytest.skip(f"needs {library}: pip install {library}")
        run(f"of_{library}")


class Bounded:
    """Tests of transports whose memory is all ours, not MPI's."""

    def test_what_is_not_copied_whole(self, run: Runner, request: pytest.FixtureRequest) -> None:
        if request.node.callspec.params["run"] == "aaa":
            pytest.skip("two members tell as much as three")
        run("extra_memory")


class Symmetric:
    """Tests of transports whose `comm.empty` returns shared memory."""

    @pytest.mark.parametrize("case", IN_PLACES)
    def test_of_symmetric_arrays(self, run: Runner, case: str) -> None:
        run(case, "symmetric")

    @pytest.mark.torture
    def test_every_operator_type_and_length_of_symmetric_arrays(self, run: Runner) -> None:
        run("every_pair_and_length", "symmetric")

    def test_sums_in_member_order_to_the_bit(self, run: Runner) -> None:
        """As NumPy adds them, one after the other: of threads and of processes alike."""
        digests: list[Any] = [*run("bits", "private"), *run("bits", "symmetric")]
        assert all(each == digests[0] for each in digests)
