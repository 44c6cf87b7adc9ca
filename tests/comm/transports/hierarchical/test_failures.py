"""Failures over hierarchical: members that disagree, leave or are stopped are named."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator
from allreduce.comm.transports import native
from allreduce.comm.transports.hierarchical import levels
from allreduce.comm.transports.hierarchical.levels import ChainQueue
from allreduce.comm.transports.hierarchical.wait_monitor import WaitMonitor
from allreduce.comm.transports.native import NativeTransport
from allreduce.comm.transports.shared.transport import SharedTransport
from tests.comm.failures import test_failures, test_mismatch
from tests.comm.ranks.hosts import lay_out
from tests.harness import run_ranks, settle_threads

Lay = Callable[[str], None]

# Tests of every transport.
test_both_calls = test_mismatch.test_members_that_disagree_all_say_so_and_no_output_is_touched
test_lines = test_mismatch.test_each_side_of_a_disagreement_has_its_own_line
test_straggler = test_mismatch.test_a_mismatch_does_not_wait_for_a_straggler
test_dead = test_failures.test_a_dead_communicator_says_so_and_why
test_started_works = test_failures.test_started_works_fail_with_the_communicator
test_abort = test_failures.test_abort_is_named_with_its_reason
test_abort_words = test_failures.test_what_an_abort_is_does_not_depend_on_the_words_of_its_reason


@pytest.fixture
def lay(monkeypatch: pytest.MonkeyPatch) -> Lay:
    return partial(lay_out, monkeypatch)


@pytest.fixture(autouse=True)
def _several_hosts(lay: Lay) -> None:
    lay("aba")  # the last of three is on the first one's host


def _types(comm: Communicator, odd: bool, out: Any) -> None:
    dtype = "int64" if odd else "float64"
    comm.all_reduce(np.ones(9, dtype), out=out.view(dtype))


def _counts(comm: Communicator, odd: bool, out: Any) -> None:
    big = np.full(750_000, 5.0)  # the first two chunks of both are alike
    count = 500_000 if odd else 750_000
    try:
        comm.all_reduce(np.ones(count), out=big[:count])
    finally:
        out[:] = big[:9] if (big == 5.0).all() else np.nan


def _collectives(comm: Communicator, odd: bool, out: Any) -> None:
    if odd:
        comm.reduce(np.ones(9), root=comm.rank, out=out)
    else:
        comm.all_reduce(np.ones(9), out=out)


@pytest.mark.parametrize("call", [_types, _counts, _collectives])
@pytest.mark.parametrize("odd", [1, 2])  # on rank 0's host; in its lane on the other
def test_members_that_disagree_are_both_named_and_no_output_is_touched(
    lay: Lay, call: Callable[[Communicator, bool, Any], None], odd: int
) -> None:
    lay("aabb")
    outs = [np.full(9, 5.0) for _ in range(4)]

    def disagree(comm: Communicator) -> None:
        comm.barrier()
        began = time.monotonic()
        try:
            call(comm, comm.rank == odd, outs[comm.rank])
        finally:
            assert time.monotonic() - began < test_mismatch.SOON_SECONDS

    outcomes = settle_threads(disagree, 4, timeout=90, comm_timeout=60)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, errors.MismatchError), outcomes
        assert f"replica {odd} " in str(outcome)
        assert str(outcome).startswith(f"[hierarchical] replica {rank} (rank 0): ")
        assert (outs[rank] == 5.0).all()


def test_members_that_never_come_are_named_and_then_all_is_over(
    lay: Lay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lay("aabb")
    monkeypatch.setattr(native, "WARN_SECONDS", 0.2)
    over = threading.Event()

    def warned() -> bool:
        return any("has waited" in record.msg for record in list(caplog.records))

    def call(comm: Communicator) -> None:
        if comm.rank % 2:
            over.wait(25)
            comm.barrier()
        until = time.monotonic() + 20
        while comm.rank == 0 and not warned() and time.monotonic() < until:
            time.sleep(0.01)  # rank 2 warns before this one gives up
        work = comm.all_reduce(np.ones(100000), async_op=True)
        try:
            work.wait(25 if comm.rank else 0.3)
        finally:
            if comm.rank == 0:
                over.set()
            with pytest.raises(errors.ClosedError, match="dead since"):
                comm.barrier()

    outcomes = settle_threads(call, 4)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [errors.TimeoutError] * 4, outcomes
    said = [str(outcome) for outcome in outcomes]
    said += [record.getMessage() for record in caplog.records if "has waited" in record.msg]
    assert len(said) == 4 + 2
    for text in said:
        for missing in (1, 3):
            assert f"replica {missing} (rank 0) has made no call yet" in text, said
    assert all(" #0 after 0.3 s: " in text for text in said[:4]), said
    assert all(
        re.search(r" has waited [\d.]+ s in all_reduce\(float64\[100000\], op='sum'\) #0: ", text)
        for text in said[4:]
    ), said


def test_a_member_that_leaves_in_the_middle_is_named_by_all(lay: Lay) -> None:
    lay("aabb")

    def call(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 2:
            comm.close()
            return
        comm.all_reduce(np.ones(1000))

    outcomes = settle_threads(call, 4)
    assert outcomes[2] is None
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank], errors.PeerLostError), outcomes
        assert "replica 2 (rank 0) (process" in str(outcomes[rank])
        assert "left normally" in str(outcomes[rank])


def test_one_that_leaves_in_the_middle_of_a_list_is_told_with_the_callers_call(
    lay: Lay, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay("aabb")

    def call(comm: Communicator) -> None:
        comm.barrier()
        leaves = comm.rank == 2
        if leaves:  # it posts its calls, and does none of its part of the steps
            monkeypatch.setattr(comm._dispatch.transport, "_advance", lambda: True)
        work = comm.all_reduce([np.ones(3000, np.float32), np.ones(1000)], async_op=True)
        if leaves:
            comm._close(drain=False)
            return
        work.wait()

    outcomes = settle_threads(call, 4)
    assert outcomes[2] is None
    listed = "while others were in all_reduce([float32[3000], float64[1000]], op='sum') #"
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank], errors.PeerLostError), outcomes
        assert "replica 2 (rank 0) (process" in str(outcomes[rank])
        assert listed in str(outcomes[rank]), outcomes


def _stopped_rank(hosts: str, victim: int) -> None:
    import os
    import signal
    import threading

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init, world
    from tests.harness import shorten

    rank = int(os.environ["ALLREDUCE_RANK"])
    os.environ["ALLREDUCE_HOST"] = hosts[rank]
    comm = init()
    pids = comm.all_gather_object(os.getpid())
    shorten(comm, 10)  # members report their waits after a second, which may begin late
    if rank == victim:  # in the middle of it
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        works = [comm.all_reduce(np.ones(3_000_000, "f4"), async_op=True) for _ in range(9)]
        for work in works:
            work.wait()
    except (errors.TimeoutError, errors.ClosedError) as error:  # the latter of a call started late
        print(str(error).split(": ", 1)[1])
    others = [other for other in range(len(hosts)) if other != victim]
    world().store.set(f"done/{rank}", b"")
    if rank == others[0]:  # then it may end
        try:
            for other in others:
                world().store.get(f"done/{other}", 25)
        finally:
            os.kill(pids[victim], signal.SIGKILL)


@pytest.mark.parametrize(
    ("hosts", "victim", "told"),
    [
        ("aaabcc", 4, "is stopped"),  # the others' mates wait for its lane
        pytest.param("aabcc", 2, "process ", marks=pytest.mark.torture),  # nobody sees it stand
        pytest.param("abab", 2, "is stopped", marks=pytest.mark.torture),
        pytest.param("aabcc", 1, "is stopped", marks=pytest.mark.torture),
    ],
)
def test_a_rank_that_is_stopped_in_the_middle_is_named_on_all_hosts(
    hosts: str, victim: int, told: str
) -> None:
    results = run_ranks(_stopped_rank, len(hosts), timeout=80, arguments=(hosts, victim))
    for rank, result in enumerate(results):
        if rank != victim:
            assert f"rank {victim} made its last call" in result.stdout, result
            assert told in result.stdout, result


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ChainQueue, "add"),  # all have got the post of the call
        (SharedTransport, "start"),  # the step is out of its queue
        (NativeTransport, "forget"),  # the step is done, and the next one not begun
        (WaitMonitor, "check"),  # a wait has looked round, and would go on to do its part
    ],
)
def test_an_interrupt_in_the_middle_of_a_call_ends_it_on_all(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    do = getattr(owner, name)
    interrupted: list[int] = []

    def interrupt(*given: Any) -> Any:
        done = do(*given)
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt  # as a handler may
        return done

    monkeypatch.setattr(owner, name, interrupt)

    def call(comm: Communicator) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # of one member's thread
            while True:  # a call may complete without coming there
                comm.all_reduce(np.ones(1000))
        comm.all_reduce(np.ones(1000))

    outcomes = settle_threads(call, 3)
    assert interrupted
    for outcome in outcomes:  # whosever part of it that thread was about
        assert isinstance(outcome, errors.ClosedError | errors.PeerLostError), outcomes
        assert "interrupted by KeyboardInterrupt" in str(outcome)


def test_a_call_is_settled_when_its_parts_have_ended_not_when_another_member_says_so() -> None:
    started = threading.Event()

    def call(comm: Communicator) -> None:
        if comm.rank:
            started.wait(25)
            comm.abort("enough")
            return
        work = comm.all_reduce(np.ones(1000), async_op=True)
        started.set()
        while not comm.dead:
            time.sleep(0.001)
        assert not work.settled  # its parts may still write to the array
        with pytest.raises(errors.PeerLostError, match="enough"):
            work.wait()
        assert work.settled

    assert settle_threads(call, 3) == [None] * 3


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_end_of_a_smaller_communicator_is_told_as_it_was(interrupted: bool) -> None:
    reason = "gave up: a file was lost before it completed #7"
    over = threading.Barrier(3)

    def call(comm: Communicator) -> None:
        transport: Any = comm._dispatch.transport
        if comm.rank == 2:  # which shares its host with the first
            transport._levels["in"].transport.abort(reason, interrupted=interrupted)
        try:
            if comm.rank != 2:
                comm.all_reduce(np.ones(1000))
        finally:
            over.wait(25)

    outcomes = settle_threads(call, 3)
    for rank in (0, 1):
        outcome = outcomes[rank]
        assert isinstance(outcome, errors.PeerLostError), outcomes
        assert outcome.interrupted == interrupted
        said = f"replica 2 (rank 0) aborted the communicator: {reason}"
        assert str(outcome) == f"[hierarchical] replica {rank} (rank 0): {said}"


def test_communicators_may_be_made_while_others_are_driven() -> None:
    class Idle:
        def drive(self) -> bool:
            return False

    over = threading.Event()
    many = [Idle() for _ in range(2000)]  # which it takes a while to look at
    for one in many:
        levels.register(one)

    def make() -> None:
        while not over.is_set():
            levels.register(Idle())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(30):
            levels.drive_all()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)
