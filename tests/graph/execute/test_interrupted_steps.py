"""Ctrl-C, or an error, in the middle of a step of several replicas leaves them usable and equal."""

from __future__ import annotations

import numpy as np
import pytest

import allreduce as ar
from allreduce.comm import replica_communicators
from allreduce.devices import lookup
from allreduce.graph.replicate.replicas import Replicas
from allreduce.graph.trace.replica import Replica
from tests.harness import collector_off, run_ranks, world_of_one


def interrupted(eagerly: bool) -> None:
    import random
    import signal

    import numpy as np

    import allreduce as ar

    ar.config.set_logical_devices("CPU", 2)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = [ar.Variable(np.eye(64) * 0.5, name=f"w{i}") for i in range(4)]
        seen = ar.Variable(np.zeros(64), name="seen")
        optimizer = ar.optim.SGD(1e-3)

    def step(x: ar.Tensor) -> ar.Tensor:
        h = x
        for each in weights:
            h = ar.ops.tanh(h @ each)
        total = ar.all_reduce(ar.ops.sum(h, axis=0))
        seen.assign(seen + total)
        optimizer.minimize(ar.ops.sum(ar.ops.square(h - total * 0.01), axis=1), weights)
        return total

    (batch,) = strategy.distribute_dataset([(np.ones((40, 64)),)])
    left = 0

    def handler(*_: object) -> None:
        nonlocal left
        if left:
            left -= 1
            raise KeyboardInterrupt

    def compile_another() -> None:
        with strategy.scope():
            fresh = ar.Variable(np.ones(64), name="fresh")
            ar.function(lambda x: ar.all_reduce(ar.ops.sum(x)) * fresh).graph(*batch)

    signal.signal(signal.SIGALRM, handler)
    hits, draw = 0, random.Random(3)
    for number in range(32):
        left = times = 1 + number % 2
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 8e-3), 1e-3)
                if number % 5:
                    strategy.run(step, args=batch, eagerly=eagerly)
                else:
                    compile_another()
            finally:
                hits += left < times
        except KeyboardInterrupt:
            pass
        left = 0
        one, other = strategy.run(step, args=batch, eagerly=eagerly).values
        assert (one == other).all()
        for each in (*weights, seen):
            assert (each.storage[0] == each.storage[1]).all(), each
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(hits)


@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
def test_an_interrupted_step_leaves_replicas_usable_and_equal(eagerly: bool) -> None:
    (result,) = run_ranks(interrupted, 1, arguments=[eagerly], timeout=40)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 2  # a traced step takes less than 2 ms, of up to 8


@pytest.mark.parametrize("eagerly", [False, True])
def test_what_only_some_replicas_had_assigned_before_an_error_is_equal_after_it(
    eagerly: bool,
) -> None:
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        seen = ar.Variable(np.zeros(2), name="seen")

    def step(x: ar.Tensor, labels: ar.Tensor) -> ar.Tensor:
        chosen = ar.ops.one_hot(labels, 3) * x
        seen.assign(seen + 1.0)
        return ar.all_reduce(ar.ops.sum(chosen))

    for labels in ([0, 9], [0, 1]):  # the second one is replica 1's
        (batch,) = strategy.distribute_dataset([(np.ones((2, 1)), np.array(labels))])
        if 9 in labels:
            with pytest.raises(ar.UsageError, match="label 9"):
                strategy.run(step, args=batch, eagerly=eagerly)
        else:
            strategy.run(step, args=batch, eagerly=eagerly)
    np.testing.assert_array_equal(seen.storage[0], seen.storage[1])


@pytest.mark.parametrize("eagerly", [False, True])
def test_an_error_leaves_no_second_set_of_memory(
    eagerly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = ar.Variable(np.ones((100, 100)), name="w")
        optimizer = ar.optim.Adam()

    def step(x: ar.Tensor, labels: ar.Tensor) -> None:
        loss = ar.nn.losses.sparse_categorical_crossentropy(labels, x @ w, from_logits=True)
        optimizer.minimize(loss, [w])

    def run(last: int) -> list[int]:
        (batch,) = strategy.distribute_dataset([(np.ones((4, 100)), np.array([0, 1, 2, last]))])
        strategy.run(step, args=batch, eagerly=eagerly)
        return [each.used for each in memories]

    memories = [lookup(name).memory for name in ("CPU:0", "CPU:1")]
    with collector_off():
        used = run(3)
        for each in memories:
            monkeypatch.setattr(each, "limit", each.used + w.storage[0].nbytes // 2)
        for _ in range(3):
            with pytest.raises(ar.UsageError, match="label 100"):
                run(100)
            assert run(3) == used


def test_replicas_of_several_ranks_say_what_has_ended_them() -> None:
    here, there = replica_communicators(world_of_one(), 2, name="ended", timeout=20)
    replicas = Replicas([lookup("CPU:0").name], 0, 2, ())
    replicas._replicas = [Replica(0, 0, here, replicas.places[0])]

    def step() -> None:
        here.abort("an interrupt")
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            replicas._exclusively(step)
        with pytest.raises(ar.ClosedError, match=r"as KeyboardInterrupt has ended a step of it\. "):
            replicas.check_not_over()
    finally:
        here.close()
        there.close()
