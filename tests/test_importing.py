"""What an import leaves behind: the collector as it was, garbage that it finds, and Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from allreduce.importing import importing


class _Ring:
    """Garbage that only the collector frees: it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Give the other tests the collector back as it was."""
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_and_is_as_it_was_afterwards(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    seen = []
    with contextlib.suppress(ImportError), importing():
        seen.append(gc.isenabled())
        raise ImportError
    assert (seen, gc.isenabled()) == ([False], enabled)


def test_no_garbage_is_kept_for_ever() -> None:
    before = weakref.ref(_Ring())
    with importing():
        meanwhile = weakref.ref(_Ring())
    gc.collect()
    assert (before(), meanwhile()) == (None, None)
    assert gc.get_freeze_count() == 0


def test_what_was_made_is_not_searched_soon() -> None:
    gc.collect()
    with importing():
        rings = [_Ring() for _ in range(10_000)]
    young = {id(one) for age in (0, 1) for one in gc.get_objects(generation=age)}
    assert young.isdisjoint(map(id, rings))


def test_what_the_program_has_frozen_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with importing():
        pass
    assert gc.get_freeze_count() > frozen // 2  # other threads may have freed some meanwhile


def test_ctrl_c_waits_for_the_import() -> None:
    done = []

    def import_something() -> None:
        with importing():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # any thread may get it
            done.append("the rest of it")

    with pytest.raises(KeyboardInterrupt):
        import_something()
    assert done == ["the rest of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_finds_the_collector_as_it_was() -> None:
    gc.enable()
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(gc.isenabled()))
    try:
        with importing():
            signal.raise_signal(signal.SIGINT)
            assert not seen
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [True]


def test_a_handler_that_an_import_has_set_stays() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    try:
        with importing():
            signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # where other tests left threads
def test_a_child_that_is_forked_meanwhile_is_in_no_import() -> None:
    gc.enable()
    with importing(), importing():
        child = os.fork()
        if child == 0:
            handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            os._exit(not (handled and gc.isenabled()))
        assert not gc.isenabled()
    assert os.waitpid(child, 0)[1] == 0


def test_another_thread_imports_without_a_handler() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_import_something).result(25) == "imported"


def _import_something() -> str:
    with importing():
        return "imported"
