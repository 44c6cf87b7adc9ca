"""Sends and recvs: one class of tests for all transports, and how they fail."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import ANY, errors
from allreduce.comm import Communicator, Work, replica_communicators
from allreduce.comm.transports import native
from tests.comm.ranks.hosts import lay_out
from tests.harness import run_ranks, run_threads, settle_threads, world_of_one


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", name)
    return name


def texts(outcomes: list[Any], kind: type[BaseException]) -> list[str]:
    for outcome in outcomes:
        assert isinstance(outcome, kind), outcomes
    return [str(outcome) for outcome in outcomes]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda comm: comm.send(np.ones(3), 2), "send got dest=2; expected a rank from 0 to 1"),
        (lambda comm: comm.send(np.ones(3), ANY), "send got dest=-1; expected a rank"),
        (lambda comm: comm.send(np.ones(3), True), "send got dest=True"),
        (lambda comm: comm.send(np.ones(3), 1.0), "send got dest=1.0"),
        (lambda comm: comm.send(np.ones(3), 1, ANY), "send got tag=-1; expected a whole number"),
        (lambda comm: comm.send(np.ones(3), 1, 1 << 31), "expected a whole number from 0 to 2147"),
        (lambda comm: comm.send(None, 1), "send takes an array or a number, but got None"),
        (lambda comm: comm.send([np.ones(3)], 1), "but got list"),
        (lambda comm: comm.recv(np.ones(3), -2), "recv got source=-2; expected a rank from 0 to"),
        (lambda comm: comm.recv(np.ones(3), 0, "a"), "got tag='a'; expected .*, or ANY"),
        (lambda comm: comm.recv(None), "recv takes an array to receive into, but got None"),
        (lambda comm: comm.recv(3.0, 1), "to receive into, but got float"),
        (lambda comm: comm.recv(np.broadcast_to(1.0, 3), 1), "recv: out is read-only"),
        (lambda comm: comm.recv(np.ones(3, ">f4"), 1), "recv does not carry >f4"),
    ],
)
def test_bad_arguments_say_what_was_expected(
    call: Callable[[Communicator], Any], says: str
) -> None:
    def member(comm: Communicator) -> None:
        with pytest.raises((errors.UsageError, errors.UnsupportedError), match=says):
            call(comm)
        comm.barrier()

    run_threads(member, 2)


def test_a_recv_knows_its_source_after_its_wait() -> None:
    def member(comm: Communicator) -> None:
        work = comm.recv(np.zeros(3), async_op=True)
        with pytest.raises(errors.UsageError, match="after wait"):
            _ = work.source
        comm.send(np.ones(3), 1 - comm.rank)
        work.wait()
        assert work.source == 1 - comm.rank

    run_threads(member, 2)


@pytest.mark.parametrize("transport", ["shared", "tcp"], indirect=True)
@pytest.mark.parametrize(
    ("sent", "says"),
    [(np.zeros(4), "4"), (np.zeros(3, "f4"), "float32"), (np.zeros(9000), "9000")],
)
def test_a_message_of_another_type_or_length_fails_on_all_members(
    transport: str, sent: Any, says: str
) -> None:
    out = np.full(3, 7.0)

    def member(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.send(sent, 2, tag=3)
        if comm.rank == 2:
            comm.recv(out, tag=3)
        comm.barrier()

    for text in texts(settle_threads(member, 3), errors.MismatchError):
        assert re.match(rf"\[{transport}\] replica \d", text)
        assert "replica 1 (rank 0)" in text
        assert "replica 2 (rank 0)" in text
        assert says in text
        assert text.count("test_messages.py:") == 2  # where both calls were made
    assert (out == 7.0).all()


def test_a_timeout_says_which_message_did_not_come() -> None:
    given_up = threading.Event()

    def member(comm: Communicator) -> None:
        comm.all_reduce(1)
        if comm.rank:
            given_up.wait(25)
            comm.all_reduce(1)
        try:
            comm.recv(np.zeros(10, "f4"), 1, 3, async_op=True).wait(timeout=0.3)
        finally:
            given_up.set()

    said = texts(settle_threads(member, 2), errors.TimeoutError)
    assert "gave up recv(float32[10], source=1, tag=3) after 0.3 s: replica 1 " in said[0]
    assert "is alive; its last collective was all_reduce(int64[1], op='sum') #0)" in said[0]
    assert "gave up recv(float32[10], source=1, tag=3) after 0.3 s: replica 1 " in said[1]


@pytest.mark.parametrize("transport", ["shared", "tcp"], indirect=True)
@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.recv(np.zeros(4)),
        lambda comm: comm.send(np.zeros(100000), 1, tag=4),
        lambda comm: comm.recv(np.zeros(4), 1, 8),
    ],
)
def test_every_wait_for_a_message_ends(transport: str, call: Callable[[Any], Any]) -> None:
    def member(comm: Communicator) -> None:
        transport: Any = comm._dispatch.transport
        transport._timeout = 0.3  # the making of the communicators may take longer
        if comm.rank == 0:
            call(comm)
        time.sleep(0.5)
        comm.barrier()

    for text in texts(settle_threads(member, 2), errors.AllreduceError):
        assert text.startswith(f"[{transport}] replica ")


@pytest.mark.parametrize("transport", ["shared", "tcp"], indirect=True)
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda comm: comm.recv(np.zeros(4), 1), r"recv\(float64\[4\], source=1, tag=ANY\)"),
        (lambda comm: comm.recv(np.zeros(4)), r"recv\(float64\[4\], source=ANY, tag=ANY\)"),
        (lambda comm: comm.send(np.zeros(90000), 1), r"send\(float64\[90000\], dest=1, tag=0\)"),
    ],
)
def test_whoever_left_while_a_message_needs_it_is_named(
    transport: str, call: Callable[[Any], Any], named: str
) -> None:
    def member(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.ones(2), 0, tag=5)
            comm.close()
            return
        assert (comm.recv(np.zeros(2), tag=5) == 1).all()  # what it had sent before
        call(comm)

    first, second = settle_threads(member, 2)
    assert second is None
    assert isinstance(first, errors.PeerLostError)
    assert "replica 1 (rank 0) " in str(first)
    assert "left normally" in str(first)
    assert re.search(named, str(first))
    assert str(first).endswith("every send needs its recv, and every recv its send")


@pytest.mark.parametrize("transport", ["shared", "tcp"], indirect=True)
@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.recv(np.zeros(4), 1, async_op=True),
        lambda comm: comm.send(np.zeros(90000), 1, async_op=True),
        lambda comm: comm.all_reduce(np.zeros(4), async_op=True),
    ],
)
def test_whoever_left_is_found_by_one_that_only_asks_whether_a_work_is_done(
    transport: str, call: Callable[[Any], Work]
) -> None:
    def member(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            comm.close()
            return
        work = call(comm)
        until = time.monotonic() + 25
        while not work.done() and time.monotonic() < until:
            time.sleep(0.001)

    first, _ = settle_threads(member, 2)
    assert isinstance(first, errors.PeerLostError)
    assert str(first).startswith(f"[{transport}] replica 0")


def test_a_message_that_its_sender_did_not_wait_for_never_comes_half() -> None:
    """Data read from a peer's array may be wrong once the peer has left."""
    length = 4_000_000

    def member(comm: Communicator) -> None:
        x = comm.empty(length, "int64")
        x[:] = 7
        comm.barrier()
        if comm.rank == 0:
            comm.send(x, 1, async_op=True)
            comm._close(drain=False)
            x[:] = 8
            return
        out = np.zeros(length, np.int64)
        comm.recv(out, 0)
        assert (out == 7).all()

    _, second = settle_threads(member, 2)
    assert second is None or isinstance(second, errors.PeerLostError)  # it may have been in time


def test_an_abort_ends_messages_that_wait() -> None:
    def member(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.2)
            comm.abort("enough")
            comm.barrier()
        comm.recv(np.zeros(4), 0)

    first, second = settle_threads(member, 2)
    assert isinstance(first, errors.ClosedError)
    assert isinstance(second, errors.PeerLostError)
    assert "aborted the communicator: enough" in str(second)


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_close_ends_a_recv_in_which_another_thread_waits_in_vain(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    if transport == "hierarchical":
        lay_out(monkeypatch, "ab")
    over = threading.Event()

    def member(comm: Communicator) -> list[type[BaseException]]:
        if comm.rank:
            over.wait(60)
            return []
        raised: list[type[BaseException]] = []
        started = threading.Barrier(3)

        def receive() -> None:
            work = comm.recv(np.zeros(3), 1, async_op=True)
            started.wait()
            try:
                work.wait()
            except errors.AllreduceError as error:
                raised.append(type(error))

        threads = [threading.Thread(target=receive) for _ in range(2)]
        for thread in threads:
            thread.start()
        started.wait()
        began = time.monotonic()
        comm.close()
        assert time.monotonic() - began < 25
        for thread in threads:
            thread.join(25)
        over.set()
        return raised

    assert run_threads(member, 2, 90, comm_timeout=60)[0] == [errors.ClosedError] * 2


def test_close_completes_a_message_that_is_on_its_way_to_another_thread() -> None:
    offered, met = threading.Event(), threading.Event()

    def member(comm: Communicator) -> None:
        x = np.full(1_000_000, 7 if comm.rank else 0)
        if comm.rank:
            work = comm.send(x, 0, async_op=True)
            offered.set()
            met.wait(25)
            work.wait()
            return
        work = comm.recv(x, 1, async_op=True)
        offered.wait(25)
        while work._work.unmet:
            work.done()
        waiting = threading.Thread(target=work.wait)
        waiting.start()
        met.set()
        comm.close()
        waiting.join(25)
        assert (x == 7).all()

    run_threads(member, 2)


def test_a_signals_handler_may_close_the_communicator_of_the_recv_that_it_has_interrupted() -> None:
    comm, peer = replica_communicators(world_of_one(), 2, name="handler", timeout=20)
    before = signal.signal(signal.SIGALRM, lambda *_: comm.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(errors.ClosedError, match="is closed"):
            comm.recv(np.zeros(3), 1)
    finally:
        signal.signal(signal.SIGALRM, before)
        peer.close()


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_a_long_wait_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    if transport == "hierarchical":
        lay_out(monkeypatch, "ab")
    monkeypatch.setattr(native, "WARN_SECONDS", 0.2)
    monkeypatch.setattr("allreduce.events.logger.propagate", True)

    def member(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(np.zeros(4), 1, 6)
        else:
            until = time.monotonic() + 25
            while "has waited" not in caplog.text and time.monotonic() < until:
                time.sleep(0.01)
            comm.send(np.zeros(4), 0, 6)

    run_threads(member, 2, comm_timeout=40)
    assert "has waited 0.2 s in recv(float64[4], source=1, tag=6): replica 1 " in caplog.text


def _killed(transport: str) -> None:
    import os
    import signal
    import time

    import numpy as np

    import allreduce as ar
    from allreduce.comm import world

    if transport == "hierarchical":  # as if on two hosts
        os.environ["ALLREDUCE_HOST"] = str(int(os.environ["ALLREDUCE_RANK"]) % 2)
    comm = ar.init(transport=transport, timeout=50)
    store = world().store
    comm.barrier()
    if comm.rank == 1:
        works = [comm.send(np.zeros(10**6), 0, async_op=True) for _ in range(3)]
        works[0].done()
        for other in (0, 2):
            store.get(f"begun/{other}", 25)
        time.sleep(0.1)  # they wait by now
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        if comm.rank == 0:
            work = comm.recv(np.zeros(10**6), 1, 9, async_op=True)
        else:
            work = comm.all_reduce(np.zeros(10**6), async_op=True)
        store.set(f"begun/{comm.rank}", b"")
        work.wait()
    except ar.PeerLostError as error:
        print(time.monotonic() - began < 25, error)
    os._exit(0)


@pytest.mark.parametrize("name", ["shared", "tcp", "hierarchical"])
def test_whoever_dies_is_named_by_each_rank_with_the_call_that_it_was_in(name: str) -> None:
    results = run_ranks(_killed, 3, arguments=(name,))
    when = {
        0: "died while rank 0 was in recv(float64[1000000], source=1, tag=9), without notice",
        2: "died before it completed all_reduce(float64[1000000], op='sum') #1, without notice",
    }
    for rank, told in when.items():
        said = results[rank].stdout
        assert said.startswith(f"True [{name}] rank {rank}: rank 1 (process "), results
        assert told in said, results
