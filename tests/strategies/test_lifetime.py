"""What a strategy has, its communicators and its programs' memory, goes when its user drops it."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import lookup
from tests.harness import collector_off, run_ranks, script_of

ROWS = np.ones((8, 4), np.float32)


class Made:
    """A strategy with a model and an optimizer, which functions at module level use."""

    def __init__(self, replicas: int) -> None:
        self.strategy = ar.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
        with self.strategy.scope():
            self.model = ar.nn.Sequential([ar.nn.Dense(3)])
            self.optimizer = ar.optim.Adam(0.1)
            self.model.compile(self.optimizer, "mean_squared_error")


here: list[Made] = []


@ar.function
def train(x: Any) -> Any:
    (made,) = here
    loss = made.model(x)
    made.optimizer.minimize(loss, made.model.trainable_variables)
    return loss


@ar.function
def predict(x: Any) -> Any:
    return here[0].model(x)


def _trained(made: Made) -> None:
    for _ in range(2):  # the second one is native
        made.strategy.run(train, args=(ROWS,))


def _fitted(made: Made) -> None:
    made.model.fit(ROWS, np.zeros((8, 3)), batch_size=3, epochs=2, verbose=0)
    made.model.evaluate(ROWS, np.zeros((8, 3)), verbose=0)


def _called(made: Made) -> None:
    with made.strategy.scope():
        predict(ROWS)
        predict.graph(ROWS)


def _run_eagerly(made: Made) -> None:
    made.strategy.run(train, args=(ROWS,), eagerly=True)


def _left_in_the_middle(made: Made) -> None:
    batches = iter(made.strategy.distribute_dataset([ROWS] * 5))
    made.strategy.run(train, args=(next(batches),))


def _failed(made: Made) -> None:
    _trained(made)
    with pytest.raises(ZeroDivisionError):
        made.strategy.run(lambda x: x / (1 // 0), args=(ROWS,))


def _explained(made: Made) -> None:
    _trained(made)
    ar.observe.explain(made.strategy, train)
    made.optimizer.load_state(made.optimizer.state())


USES = (
    *(_trained, _fitted, _called, _run_eagerly),
    *(_left_in_the_middle, _failed, _explained),
)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("use", USES)
def test_one_collection_frees_what_was_dropped(use: Callable[[Made], None], replicas: int) -> None:
    here[:] = [Made(replicas)]
    use(here[0])
    strategy = weakref.ref(here[0].strategy)
    variable = weakref.ref(here[0].model.variables[0])
    here.clear()
    gc.collect()
    assert strategy() is None
    assert variable() is None


def test_an_optimizer_keeps_its_state_and_a_copy_begins_without() -> None:
    here[:] = [Made(1)]
    _trained(here[0])
    optimizer = here[0].optimizer
    here.clear()
    gc.collect()
    assert {key.rpartition("/")[2] for key in optimizer.state()} == {"iterations", "m", "v"}
    for other in (
        *(copy.copy(optimizer), copy.deepcopy(optimizer)),
        pickle.loads(pickle.dumps(optimizer)),
    ):
        assert list(other.state()) == ["iterations"]


def test_the_next_call_frees_what_a_function_that_is_gone_had() -> None:
    strategy = ar.MirroredStrategy(["CPU:0"])
    memory = lookup("CPU:0").memory

    def run(columns: int) -> None:
        x = np.ones((4, columns), np.float32)
        strategy.run(lambda x: ar.ops.matmul(x, ar.ops.transpose(x * 2)), args=(x,))

    run(4)
    with collector_off():
        before = memory.used
        run(100_000)
        assert memory.used > before
        run(4)
        assert memory.used <= before + 4096


def test_a_strategy_ends_its_threads() -> None:
    before = set(threading.enumerate())
    here[:] = [Made(2)]
    _trained(here[0])
    (first, second) = set(threading.enumerate()) - before
    here.clear()
    gc.collect()
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()


def test_neither_classes_of_layers_nor_defaults_of_functions_are_kept() -> None:
    strategy = ar.MirroredStrategy(["CPU:0"])

    class Own(ar.nn.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            return inputs * 2.0 if training else inputs

    layers: list[Any] = [Own()]

    def step(x: Any, scale: float = 2.0, layers: Any = layers) -> Any:
        return layers[0](x) * scale

    layers.append(step)  # a default that refers to its function
    strategy.run(step, args=(ROWS,), kwargs={"scale": 3.0})
    left = [weakref.ref(each) for each in (Own, step)]
    Own, step, layers = None, None, None  # type: ignore[assignment,misc]
    gc.collect()
    gc.collect()  # of what the function's programs have held
    assert [each() for each in left] == [None, None]


def many_strategies() -> None:
    import gc
    import json
    import os
    from pathlib import Path
    from typing import Any  # noqa: F401  # the program has no other

    import numpy as np

    import allreduce as ar

    strategy: Any = None
    model: Any = None
    optimizer: Any = None

    @ar.function
    def train(x: Any) -> Any:
        loss = model(x)
        optimizer.minimize(loss, model.trainable_variables)
        return loss

    def held() -> int:
        """Count descriptors, and what is mapped of memory files."""
        files = Path("/proc/self/maps").read_text().count("memfd:")
        return len(os.listdir("/proc/self/fd")) + files

    x, found = np.ones((8, 4), np.float32), []
    gc.disable()  # the first one is still there when it is counted
    for _ in range(30):
        strategy = ar.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model, optimizer = ar.nn.Sequential([ar.nn.Dense(3)]), ar.optim.Adam()
        for _ in range(2):
            strategy.run(train, args=(x,))
        strategy = model = optimizer = None
        found.append(held())
        gc.enable()
    gc.collect()
    print(json.dumps({"first": found[0], "most": max(found), "end": held()}))


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_dropped_strategies_of_several_ranks_hold_little(transport: str) -> None:
    results = run_ranks(many_strategies, 2, env={"ALLREDUCE_TRANSPORT": transport})
    for result in results:
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        # A strategy has three, and eight may wait for the collector.
        assert found["most"] < found["first"] + 40
        assert found["end"] < found["first"]


def dropped_at_different_times() -> None:
    import gc
    import time
    from typing import Any  # noqa: F401  # the program has no other

    import numpy as np

    import allreduce as ar

    strategy: Any = None
    model: Any = None
    optimizer: Any = None

    @ar.function
    def train(x: Any) -> Any:
        loss = model(x)
        optimizer.minimize(loss, model.trainable_variables)
        return loss

    rank, kept = ar.init().rank, []
    for number in range(9):
        strategy = ar.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = ar.nn.Sequential([ar.nn.Dense(300), ar.nn.Dense(500)])
            optimizer = ar.optim.Adam()
        for _ in range(3):
            strategy.run(train, args=(np.ones((8, 400), np.float32),))
        if number % 3 == rank:
            kept.append((strategy, model, optimizer))
        elif rank == number % 2:
            time.sleep(0.05)  # the other one has left
            optimizer.state()  # of which it has a part
        strategy = model = optimizer = None
        if rank == 0:
            gc.collect()
    ar.init().barrier()
    kept.clear()
    gc.collect()
    ar.init().barrier()
    print("over")


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_ranks_drop_strategies_when_they_like(transport: str) -> None:
    results = run_ranks(
        dropped_at_different_times, 2, timeout=40, env={"ALLREDUCE_TRANSPORT": transport}
    )
    for result in results:
        assert (result.returncode, result.stdout) == (0, "over\n"), result.stderr


def test_a_rank_hears_of_another_one_that_has_dropped_the_strategy() -> None:
    def dropped_too_early() -> None:
        import gc

        import numpy as np

        import allreduce as ar

        strategy = ar.MultiWorkerMirroredStrategy()
        world = strategy.communicator
        strategy.run(lambda x: ar.all_reduce(x), args=(np.ones(3),))
        if world.rank == 1:
            del strategy
            gc.collect()
            world.barrier()
            return
        world.barrier()
        try:
            strategy.run(lambda x: ar.all_reduce(x), args=(np.ones(3),))
        except ar.errors.PeerLostError as error:
            print("rank 1" in str(error), "left" in str(error))

    first, second = run_ranks(script_of(dropped_too_early), 2, timeout=30)
    assert (first.stdout, second.returncode) == ("True True\n", 0), (first, second)
