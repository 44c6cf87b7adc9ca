"""Groups: one class of tests for all transports, and wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator
from tests.harness import run_ranks, run_threads


def test_replicas_of_one_process_have_no_groups() -> None:
    def member(comm: Communicator) -> None:
        says = "communicators of processes"
        with pytest.raises(errors.UnsupportedError, match=says):
            comm.split(0)
        with pytest.raises(errors.UnsupportedError, match=says):
            comm.group([0])
        with pytest.raises(errors.UnsupportedError, match=says):
            _ = comm.local

    run_threads(member, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda comm: comm.split("a"), "split got color='a'; expected a whole number, or None"),
        (lambda comm: comm.split(0, 1.5), "split got key=1.5; expected a whole number"),
        (lambda comm: comm.split(1 << 63), "split got color=9223372036854775808"),
        (lambda comm: comm.split(0, transport="shard"), "did you mean 'shared'?"),
        (lambda comm: comm.group([]), r"group got ranks=\[\]; expected a list of ranks from 0 to"),
        (lambda comm: comm.group(3), "group got ranks=3; expected"),
        (lambda comm: comm.group([1]), r"ranks=\[1\]; expected a list of ranks from 0 to 0"),
        (lambda comm: comm.group([0, 0]), "one of them comes twice"),
    ],
)
def test_bad_arguments_say_what_was_expected(
    call: Callable[[Communicator], Any], says: str
) -> None:
    def member(comm: Communicator) -> None:
        with pytest.raises(errors.UsageError, match=says):
            call(comm)

    run_threads(member, 1)


def _disagree(transport: str) -> None:
    import numpy as np

    import allreduce as ar

    comm = ar.init(transport=transport, timeout=20)
    part = comm.split(0 if comm.rank else None, -comm.rank)  # members 0 and 1 are ranks 2 and 1
    if part is None:
        comm.barrier()
        return
    again = part.group([0, 1])
    assert again is not None
    try:
        again.all_reduce(np.zeros(5 + comm.rank))
    except ar.MismatchError as error:
        print(error)
    try:
        part.recv(np.zeros(3), part.rank, 4, async_op=True).wait(timeout=0.2)
    except ar.AllreduceError as error:
        print(error)
    comm.barrier()


@pytest.mark.parametrize("name", ["shared", "tcp"])
def test_errors_tell_the_group_and_the_ranks_of_the_world(name: str) -> None:
    results = run_ranks(_disagree, 3, arguments=(name,))
    assert [result.returncode for result in results] == [0, 0, 0], results
    for rank in (1, 2):
        first, second = results[rank].stdout.splitlines()
        assert first.startswith(f"[{name}] world.1/split.1/group.1: rank {rank}"), first
        assert "rank 1" in first
        assert "rank 2 (member 0)" in first
        assert "float64[6]" in first or "6" in first
        assert second.startswith(f"[{name}] world.1/split.1: rank {rank}"), second


def test_a_split_is_refused_everywhere_where_transports_differ() -> None:
    def program() -> None:
        import allreduce as ar

        comm = ar.init()
        try:
            comm.split(0, transport="tcp" if comm.rank else None)
        except ar.MismatchError as error:
            print("name the same" in str(error))
        part = comm.split(0, transport="tcp")
        assert part is not None
        print(part.transport, part.all_reduce(1))

    for result in run_ranks(program, 2):
        assert result.stdout.split() == ["True", "tcp", "2"], result


def test_a_group_over_threads_of_one_member_works() -> None:
    def member(comm: Communicator) -> None:
        part = comm.split(3)
        assert part is not None
        np.testing.assert_array_equal(part.all_reduce(np.ones(3)), np.ones(3))
        assert (comm.local.size, comm.across.size) == (1, 1)
        part.close()
        with pytest.raises(errors.ClosedError, match="the communicator that it came from makes"):
            part.barrier()

    run_threads(member, 1)


def test_closing_closes_all_parts_though_one_fails() -> None:
    def member(comm: Communicator) -> None:
        local, across = comm.local, comm.across
        local.recv(np.zeros(1), async_op=True)
        with pytest.raises(errors.TimeoutError, match=r"/local\.1: .*: gave up recv"):
            comm.close()
        assert local.closed
        assert across.closed

    run_threads(member, 1, comm_timeout=0.3)
