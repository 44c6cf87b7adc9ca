"""Operations that do not depend on each other run at once, and nothing else does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.errors import UsageError
from allreduce.graph.core import op_table
from allreduce.graph.execute import bound_program, inter_op_pool
from tests.graph.eager.eager_cases import NETWORKS, trained
from tests.harness import collector_off, run_ranks

THREADS = 3


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))


def _use(threads: int) -> None:
    ar.config.threading.set_inter_op_parallelism_threads(threads)


class _AnyOrder:
    """Runs steps in any order that their dependencies allow, on one thread."""

    def __init__(
        self,
        steps: Sequence[Any],
        after: Sequence[frozenset[int]],
        free: object,
        threads: int,
        runs: object,
    ) -> None:
        assert 2 <= threads <= THREADS
        self._steps, self._after = steps, after
        self._random = random.Random(len(steps))

    def run(self) -> None:
        over: set[int] = set()
        while len(over) < len(self._steps):
            ready = [i for i, before in enumerate(self._after) if i not in over and before <= over]
            chosen = self._random.choice(ready)
            self._steps[chosen]()
            over.add(chosen)


class Split(ar.nn.Model):
    """A part of each replica on its second device, and a scan."""

    def __init__(self) -> None:
        super().__init__()
        with ar.device("CPU:1"):
            self.inner = ar.nn.Dense(8, activation="gelu")
        self.branch = ar.nn.Dense(8)
        self.out = ar.nn.Dense(3, activation="softmax")

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = ar.ops.reshape(inputs, (inputs.shape[0], 72))
        both = self.inner(x) * self.branch(x)
        rows = ar.ops.transpose(ar.ops.reshape(both, (inputs.shape[0], 4, 2)), (1, 0, 2))
        last, _ = ar.scan(lambda carry, row: (ar.ops.tanh(carry + row), None), rows[0] * 0, rows)
        return self.out(ar.ops.concatenate([both, last], axis=1))


@pytest.mark.parametrize("any_order", [False, True], ids=["threads", "any order"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("network", [*NETWORKS, "split"])
def test_training_gives_the_same_bits(
    network: str, replicas: int, any_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = network == "split"
    make: Callable[[], Any] = Split if split else NETWORKS[network]
    owned = [f"CPU:{i}" for i in range(2 * replicas if split else replicas)]
    strategy = ar.MirroredStrategy(owned, devices_per_replica=2 if split else 1)
    wanted = trained(make, strategy, eagerly=False)
    if any_order:
        monkeypatch.setattr(bound_program, "InterOpPool", _AnyOrder)
    _use(THREADS)
    for one, other in zip(trained(make, strategy, eagerly=False), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def ranks() -> None:
    import numpy as np

    import allreduce as ar
    from tests.graph.eager.eager_cases import NETWORKS, trained

    strategy = ar.MultiWorkerMirroredStrategy()
    for make in NETWORKS.values():
        runs = []
        for threads in (1, 2):
            ar.config.threading.set_inter_op_parallelism_threads(threads)
            runs.append(trained(make, strategy, eagerly=False))
        assert all(np.array_equal(one, other) for one, other in zip(*runs, strict=True))


def test_ranks_give_the_same_bits() -> None:
    for result in run_ranks(ranks, 2):
        assert result.returncode == 0, result


def interrupted() -> None:
    import random
    import signal
    import threading
    from types import FrameType

    import numpy as np

    import allreduce as ar
    from allreduce.graph.execute import inter_op_pool
    from tests.graph.execute.test_inter_op_threads import _meeting

    ar.config.threading.set_inter_op_parallelism_threads(3)
    weights = [np.random.default_rng(i).normal(size=(64, 64)) / 8 for i in range(6)]

    @ar.function
    def step(x: ar.Tensor) -> ar.Tensor:
        for each in weights:
            x = ar.ops.tanh(x @ each) + ar.ops.tanh(x @ each.T)
        return x

    x = np.random.default_rng(9).normal(size=(64, 64))
    wanted = np.asarray(step(x))
    left, anywhere = 0, True

    def handler(_: int, frame: FrameType | None) -> None:
        nonlocal left
        if left and (anywhere or (frame and frame.f_code.co_filename == inter_op_pool.__file__)):
            left -= 1
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    hits, draw = 0, random.Random(3)
    for number in range(100):
        anywhere = number % 4 == 0
        left = 1 if anywhere else 30  # however often: some leave while helpers are in the step
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 2e-3), 1.5e-5)
            step(x)
        except KeyboardInterrupt:
            hits += 1
        left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        np.testing.assert_array_equal(np.asarray(step(x)), wanted)
    all_three = threading.Barrier(3)
    one, two, three = (_meeting(f"m{i}", lambda: all_three.wait(timeout=25)) for i in range(3))
    ar.function(lambda x: one(x) + two(x) + three(x))(x)  # needs both helpers
    print(hits)


def test_an_interrupted_step_leaves_the_helpers_usable() -> None:
    (result,) = run_ranks(interrupted, 1, timeout=40)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10


def _meeting(name: str, meet: Callable[[], Any]) -> Any:
    """Make an operation that copies its input after it has met another one."""

    def kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: object) -> None:
        meet()
        out[...] = inputs[0]

    return ar.register_op(name, shape=lambda specs, attrs: specs[0], cpu=kernel)


def test_threads_that_come_together_start_no_more_helpers_than_asked_for() -> None:
    def count() -> int:
        return sum(thread.name == "allreduce-op" for thread in threading.enumerate())

    helpers, together, before = inter_op_pool._Helpers(), threading.Barrier(4), count()

    def start() -> None:
        together.wait(timeout=25)
        helpers.start(3)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(25)
    assert count() == before + 3


def test_two_operations_run_at_the_same_time() -> None:
    both, patience = threading.Barrier(2), [0.1]
    one, other = (_meeting(name, lambda: both.wait(patience[0])) for name in ("one", "other"))

    @ar.function
    def step(x: Any) -> Any:
        return one(x) + other(x)

    with pytest.raises(threading.BrokenBarrierError):
        step(np.ones(3))
    both.reset()
    patience[0] = 25
    _use(2)
    np.testing.assert_array_equal(step(np.ones(3)), np.full(3, 2.0))


def test_an_error_ends_the_step_and_the_next_one_runs() -> None:
    broken = [True]

    def fail() -> None:
        if broken:
            raise ArithmeticError("it does not work")

    one, other = _meeting("one", fail), _meeting("other", lambda: None)

    @ar.function
    def step(x: Any) -> Any:
        return one(x) + other(x) * other(x + 1.0)

    _use(THREADS)
    with pytest.raises(ArithmeticError, match="it does not work"):
        step(np.ones(3))
    broken.clear()
    np.testing.assert_array_equal(step(np.ones(3)), np.full(3, 3.0))


def test_an_update_waits_for_all_that_read_the_variable() -> None:
    slow = threading.Event()
    late = _meeting("late", lambda: slow.wait(0.2))
    v = ar.Variable(np.ones(3), name="v")

    @ar.function
    def step(x: Any) -> Any:
        seen = late(x) * v
        v.assign(v + x)
        return seen

    _use(THREADS)
    np.testing.assert_array_equal(step(np.ones(3)), np.ones(3))
    np.testing.assert_array_equal(v.numpy(), np.full(3, 2.0))


def test_the_body_of_a_scan_shares_memory_whatever_is_chosen() -> None:
    def body(carry: Any, row: Any) -> tuple[Any, None]:
        for _ in range(8):
            carry = carry @ carry + row
        return carry, None

    def step(x: Any) -> Any:
        last, _ = ar.scan(body, x * 0.0, ar.ops.reshape(x, (32, 1, 32)))
        return ar.ops.sum(last)

    def taken() -> int:
        strategy = ar.MirroredStrategy(["CPU:0"])
        with collector_off():
            before = ar.config.get_memory_info("CPU:0")["current"]
            strategy.run(step, (np.ones((32, 32)),))
            return ar.config.get_memory_info("CPU:0")["current"] - before

    alone = taken()
    assert alone > 0
    _use(2)
    assert taken() <= alone + 2 * 32 * 32 * 8  # of the step's own values


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_a_number_of_threads_that_is_none(count: Any) -> None:
    with pytest.raises(UsageError, match=r"inter-op threads.*1"):
        ar.config.threading.set_inter_op_parallelism_threads(count)
    assert ar.config.threading.get_inter_op_parallelism_threads() == 1
