"""Failures over tcp: members that disagree, die, leave or are stopped are named."""

from __future__ import annotations

import functools

import pytest

from allreduce import errors
from tests.comm.core import test_forks
from tests.comm.failures import test_endings, test_failures, test_mismatch
from tests.harness import run_ranks, settle_threads, world_of_one

# Tests of every transport.
test_both_calls = test_mismatch.test_members_that_disagree_all_say_so_and_no_output_is_touched
test_lines = test_mismatch.test_each_side_of_a_disagreement_has_its_own_line
test_lines_without_wait = (
    test_mismatch.test_a_member_that_does_not_wait_for_its_call_is_named_with_its_line
)
test_straggler = test_mismatch.test_a_mismatch_does_not_wait_for_a_straggler
test_dead = test_failures.test_a_dead_communicator_says_so_and_why
test_started_works = test_failures.test_started_works_fail_with_the_communicator
test_abort = test_failures.test_abort_is_named_with_its_reason
test_abort_words = test_failures.test_what_an_abort_is_does_not_depend_on_the_words_of_its_reason
test_long_reason = test_failures.test_a_long_reason_is_cut_between_characters
test_left = test_failures.test_one_that_left_normally_is_reported_as_that
test_leaving = test_failures.test_leaving_after_the_last_call_disturbs_nobody
test_close = test_failures.test_close_completes_what_was_started
test_timeout = test_failures.test_a_timeout_names_the_missing_member_its_last_call_and_the_time
test_own_timeout = test_failures.test_a_work_has_a_timeout_of_its_own
test_long_wait = test_failures.test_a_long_wait_is_reported_once_before_it_fails
test_no_memory = test_failures.test_absurd_symmetric_memory_is_refused_on_all_members
test_killed = test_endings.test_survivors_name_the_killed_rank_soon
test_killed_inside = test_endings.test_a_rank_killed_inside_a_collective_is_named
test_fork = test_forks.test_a_forked_child_cannot_take_part_nor_hide_its_parents_death
test_fork_works = test_forks.test_a_child_forked_while_works_run_gets_an_error_and_leaves_them_alone
test_ctrl_c = test_endings.test_ctrl_c_ends_a_wait_and_the_others_learn_why
test_without_close = test_endings.test_ranks_may_end_without_close


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")
    on_tcp = functools.partial(run_ranks, env={"ALLREDUCE_TRANSPORT": "tcp"})
    for module in (test_endings, test_forks):
        monkeypatch.setattr(module, "run_ranks", on_tcp)


def test_an_interface_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from allreduce.comm import replica_communicators

    for name in ("nowhere0", "203.0.113.7"):
        monkeypatch.setenv("ALLREDUCE_TCP_INTERFACE", name)
        with pytest.raises(errors.UsageError, match=f"ALLREDUCE_TCP_INTERFACE='{name}'.* lo"):
            replica_communicators(world_of_one(), 2, name="gone", timeout=5)


def test_an_interface_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lo", "127.0.0.1", "::1"):
        monkeypatch.setenv("ALLREDUCE_TCP_INTERFACE", name)
        outcomes = settle_threads(lambda comm: float(comm.all_reduce(1.5)), 2)
        if name == "::1" and isinstance(outcomes[0], errors.UsageError):
            continue
        assert outcomes == [3.0, 3.0]


def test_ranks_need_the_same_number_of_connections() -> None:
    def program() -> None:
        import os

        os.environ["ALLREDUCE_TCP_CONNECTIONS"] = str(1 + int(os.environ["ALLREDUCE_RANK"]))
        from allreduce import errors
        from allreduce.comm import init

        try:
            init(timeout=10)
        except errors.UsageError as error:
            print(error)

    for result in run_ranks(program, 2, env={"ALLREDUCE_TRANSPORT": "tcp"}):
        assert "ALLREDUCE_TCP_CONNECTIONS is 1 on rank 0 but 2 on rank 1" in result.stdout, result
