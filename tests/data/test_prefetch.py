"""One item ahead, and nothing left behind however the iteration ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from allreduce import events
from allreduce.data.prefetch import on_demand, prefetch
from allreduce.devices import options

_earlier: list[threading.Thread] = []  # of other tests' iterators, which may still be about


@pytest.fixture(autouse=True)
def _begin_anew() -> None:
    _earlier.clear()
    _earlier[:] = our_threads()


def our_threads() -> list[threading.Thread]:
    named = [thread for thread in threading.enumerate() if thread.name == "allreduce-data"]
    return [thread for thread in named if thread not in _earlier]


def wait_until_gone() -> None:
    deadline = time.monotonic() + 25
    while our_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert our_threads() == []


def test_gives_every_item_in_order() -> None:
    assert list(prefetch(range(100))) == list(range(100))
    wait_until_gone()


def test_nobody_is_said_to_wait_for_what_does_not_follow() -> None:
    told: list[str] = []
    stop = events.subscribe(lambda event: told.append(event.name))
    try:
        assert list(prefetch(range(3))) == [0, 1, 2]
    finally:
        stop()
    assert told.count("wait for a batch") == told.count("make a batch") == 3
    wait_until_gone()


def test_makes_exactly_one_item_while_the_caller_works() -> None:
    made: list[int] = []
    second = threading.Event()

    def source() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            if number == 1:
                second.set()
            yield number

    items = prefetch(source())
    assert next(items) == 0
    assert second.wait(25)  # made although nobody has asked for it
    time.sleep(0.05)
    assert made == [0, 1]
    assert next(items) == 1
    items.close()


def test_an_error_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("broken file")

    items = prefetch(source())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="broken file"):
        next(items)
    wait_until_gone()


def test_leaving_the_loop_ends_the_thread_and_the_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    def first_three() -> list[int]:
        taken = []
        for number in prefetch(source()):
            taken.append(number)
            if number == 2:
                break
        return taken

    assert first_three() == [0, 1, 2]
    gc.collect()
    assert closed.wait(25)
    wait_until_gone()


def test_an_error_in_the_loop_ends_the_thread() -> None:
    def work() -> None:
        for number in prefetch(range(1000)):
            if number == 5:
                raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        work()
    gc.collect()
    wait_until_gone()


@pytest.mark.parametrize("how", ["not pipelined", "in turn"])
def test_an_item_is_made_when_it_is_wanted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_current", options.Options(pipelining=how == "in turn"))
    made: list[int] = []

    def source() -> Iterator[int]:
        try:
            for number in range(3):
                made.append(number)
                yield number
        finally:
            made.append(-1)

    told: list[tuple[float, float]] = []
    iterate = on_demand if how == "in turn" else prefetch
    items = iterate(source(), lambda *seconds: told.append(seconds))
    assert next(items) == 0
    assert our_threads() == []
    assert made == [0]
    assert next(items) == 1
    items.close()
    assert made == [0, 1, -1]
    assert len(told) == 2
    assert all(took == waited > 0 for took, waited in told)


def test_what_an_item_took_is_told_with_it() -> None:
    told: list[tuple[float, float]] = []

    def source() -> Iterator[int]:
        for number in range(2):
            time.sleep(0.02)
            yield number

    for number in prefetch(source(), lambda *seconds: told.append(seconds)):
        assert len(told) == number + 1  # before the caller has it
    assert len(told) == 2
    assert all(took >= 0.02 for took, _ in told)
