"""A signal handler that raises anywhere in a call: no wrong result, and no member left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator, replica_communicators
from allreduce.comm.arguments import scaling
from allreduce.comm.core.locks import run_locked
from allreduce.comm.core.work import Work
from tests.harness import run_threads, world_of_one

TRANSPORTS = pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
INTERRUPTED = "interrupted by KeyboardInterrupt"
COUNT = 50_000


class _LateError(Exception):
    """An exception of a handler other than Ctrl-C's."""


def once(
    before: Callable[..., Any],
    after: bool,
    where: threading.Thread,
    kind: type[BaseException] = KeyboardInterrupt,
) -> Callable[..., Any]:
    """Return a function that is interrupted when it is first called in a thread.

    Args:
        before: The function.
        after: Whether the interrupt comes after the function's work.
        where: The thread.
        kind: The exception.
    """
    left = [where]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() not in left:
            return before(*arguments, **options)
        left.clear()
        if after:
            before(*arguments, **options)
        raise kind

    return interrupted


@pytest.mark.parametrize("async_op", [False, True])
def test_a_result_that_was_interrupted_is_not_scaled_again(
    async_op: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(comm: Communicator) -> float:
        x = np.full(3, 8.0)
        if comm.rank == 0:
            me = threading.current_thread()
            monkeypatch.setattr(scaling, "apply", once(scaling.apply, True, me))
            options: Any = {"out": x, "postscale": 0.5}
            if not async_op:
                with pytest.raises(KeyboardInterrupt):
                    comm.all_reduce(x, **options)
            else:
                work = comm.all_reduce(x, async_op=True, **options)
                with pytest.raises(KeyboardInterrupt):
                    work.wait()
                for _ in range(2):
                    with pytest.raises(errors.ClosedError, match="incomplete; make the call again"):
                        work.wait()
        else:
            comm.all_reduce(x, out=x, postscale=0.5)
        comm.barrier()  # the call itself was complete
        return float(x.max())

    assert run_threads(call, 2) == [8.0, 8.0]


@TRANSPORTS
def test_a_call_that_is_interrupted_after_its_start_touches_no_array_later(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    over, late = threading.Event(), threading.Event()

    def call(comm: Communicator) -> str:
        x = np.ones(COUNT)
        if comm.rank == 1:
            over.wait(25)
            with pytest.raises(errors.PeerLostError, match=INTERRUPTED):
                comm.all_reduce(x, prescale=2.0)
            late.set()
            return "told"
        me = threading.current_thread()
        monkeypatch.setattr(Work, "wait", once(Work.wait, False, me))
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(x, prescale=2.0, out=x)
        over.set()
        with pytest.raises(errors.ClosedError, match=INTERRUPTED):
            comm.barrier()
        late.wait(25)
        assert x.max() < 4  # as after the factor at most: nothing has been added
        return "dead"

    assert run_threads(call, 2) == ["dead", "told"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, _LateError])
@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.empty(COUNT),
        lambda comm: comm.all_reduce_init(np.ones(COUNT), out=np.ones(COUNT))().wait(),
        lambda comm: comm.all_reduce(np.ones(COUNT), prescale=2.0),
    ],
)
def test_a_call_that_is_interrupted_between_its_start_and_what_follows_ends_on_all(
    call: Callable[[Communicator], Any],
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = f"interrupted by {kind.__name__}"

    def on(comm: Communicator) -> None:
        call(comm)
        comm.barrier()

    def member(comm: Communicator) -> None:
        if comm.rank == 0:
            first = once(comm._dispatch.in_order, True, threading.current_thread(), kind)
            monkeypatch.setattr(comm._dispatch, "in_order", first)
            with pytest.raises(kind):
                call(comm)
            with pytest.raises(errors.ClosedError, match=says):
                comm.barrier()
        else:
            with pytest.raises(errors.PeerLostError, match=says):
                on(comm)

    run_threads(member, 2)


def test_a_compound_call_that_is_interrupted_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(comm: Communicator) -> str:
        if comm.rank == 1:
            with pytest.raises(errors.PeerLostError, match=INTERRUPTED):
                comm.all_gather_object(1)
            return "told"
        first = once(comm._dispatch.in_order, True, threading.current_thread())
        monkeypatch.setattr(comm._dispatch, "in_order", first)
        with pytest.raises(KeyboardInterrupt):
            comm.all_gather_object(0)
        with pytest.raises(errors.ClosedError, match=INTERRUPTED):
            comm.all_gather_object(0)
        return "dead"

    assert run_threads(call, 2) == ["dead", "told"]


def test_the_interrupt_of_one_thread_is_not_raised_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm, peer = replica_communicators(world_of_one(), 2, name="interrupts", timeout=25)
    work = comm.all_reduce(np.ones(3), async_op=True)
    caught: list[BaseException] = []

    def interrupt() -> None:
        first = once(comm._dispatch.in_order, False, threading.current_thread())
        monkeypatch.setattr(comm._dispatch, "in_order", first)
        try:
            comm.all_gather_object(1)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=interrupt)
    thread.start()
    thread.join(25)
    assert [type(one) for one in caught] == [KeyboardInterrupt]
    with pytest.raises(errors.ClosedError, match=INTERRUPTED):
        work.wait()
    with pytest.raises(errors.ClosedError, match=INTERRUPTED):  # the lock is free
        comm.all_gather_object(1)
    comm.close()
    peer.close()


class Interrupting:
    """A lock whose first acquire, which takes it, is interrupted before it returns."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.acquire = once(self._lock.acquire, True, threading.current_thread())
        self.release = self._lock.release
        self._is_owned: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]


def test_a_lock_is_free_after_an_interrupt_as_soon_as_it_is_held() -> None:
    lock: Any = Interrupting()
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_locked(lock, 1.0, lambda: done.append("not reached"))
    assert not lock._is_owned()
    assert run_locked(lock, 1e10, lambda: done.append("reached"))
    assert not lock._is_owned()
    assert done == ["reached"]


def test_what_a_callers_array_raises_before_the_start_ends_nothing() -> None:
    class Foreign:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise _LateError

        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("the device is asked for first")

    def call(comm: Communicator) -> Any:
        comm.barrier()
        comm.all_reduce_init(np.ones(3), out=np.ones(3))().wait()  # which has started
        with pytest.raises(_LateError):
            comm.all_reduce(Foreign())
        return comm.all_reduce(1)

    assert run_threads(call, 2) == [2, 2]
