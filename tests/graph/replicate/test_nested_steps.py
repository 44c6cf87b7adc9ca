"""A step in the middle of another one of the same replicas is refused, and that one goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.errors import UsageError
from allreduce.graph.core import op_table
from allreduce.graph.replicate.replicator import Replicator


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(options, "_current", options.Options())
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


class _Nested:
    """Two operations that do not depend on each other, each of which calls the step once more."""

    def __init__(self, replicator: Replicator) -> None:
        self._replicator = replicator
        self._inside = threading.local()
        self.refused: list[str] = []
        # No event: its lock may be held by the very frame that a handler interrupts.
        self._over: SimpleQueue[None] = SimpleQueue()
        # By turns: signals that come faster than a busy machine handles them keep it from all else.
        self._sending = threading.Lock()
        one, other = self._operation("one"), self._operation("other")
        self._step = lambda x: one(x) + other(x * 2.0)
        self.how: Callable[[], object] = self.again

    def _operation(self, name: str) -> Any:
        def kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: object) -> None:
            if not getattr(self._inside, "it", False):
                self._inside.it = True
                try:
                    self.how()
                finally:
                    self._inside.it = False
            out[...] = inputs[0]

        return ar.register_op(name, shape=lambda specs, attrs: specs[0], cpu=kernel)

    def run(self, x: float) -> Sequence[Any]:
        values: Sequence[Any] = self._replicator.run(self._step, (np.full(3, x),)).values
        return values

    def again(self) -> None:
        """Call the step, as a kernel does."""
        try:
            self.run(7.0)
        except UsageError as error:
            self.refused.append(str(error))

    def handle(self, *_: object) -> None:
        """Call the step, as a signal's handler does, which the main thread runs."""
        self.again()
        self._over.put(None)

    def signal(self) -> None:
        """Have the handler run, and be in the step as long as it does."""
        main = threading.main_thread().ident
        assert main is not None
        with self._sending:
            with suppress(Empty):  # of one that was sent twice
                while True:
                    self._over.get_nowait()
            for attempt in range(10):  # one that comes just before the main thread waits is lost
                signal.pthread_kill(main, signal.SIGUSR1)
                with suppress(Empty):
                    return self._over.get(timeout=0.02 * 2**attempt)
        raise AssertionError("the handler has not run")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("by", ["kernel", "handler"])
def test_a_step_in_the_middle_of_another_one_is_refused(
    by: str, replicas: int, threads: int
) -> None:
    ar.config.threading.set_inter_op_parallelism_threads(threads)
    strategy = ar.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    nested = _Nested(strategy)
    if by == "handler":
        signal.signal(signal.SIGUSR1, nested.handle)
        nested.how = nested.signal
    for x in (1.0, 2.0):
        for part in nested.run(x):
            np.testing.assert_array_equal(part, np.full(3, 3 * x))
    assert len(nested.refused) >= 2
    for text in nested.refused:
        assert f"a step of {strategy!r} was called in the middle of another one" in text
    strategy.close()


def test_a_step_of_other_replicas_is_not() -> None:
    ar.config.threading.set_inter_op_parallelism_threads(2)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    nested, double = _Nested(strategy), ar.function(lambda x: x * 2.0)
    found = []
    nested.how = lambda: found.append(np.asarray(double(np.ones(2))).tolist())
    for part in nested.run(1.0):
        np.testing.assert_array_equal(part, np.full(3, 3.0))
    assert found == [[2.0, 2.0]] * 4
    strategy.close()
