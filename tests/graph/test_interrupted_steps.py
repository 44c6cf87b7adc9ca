"""Ctrl-C in the middle of a step of several replicas leaves them usable."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks


def interrupted(eagerly: bool) -> None:
    import random
    import signal

    import numpy as np

    import allreduce as ar

    ar.config.set_logical_devices("CPU", 2)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = [ar.Variable(np.eye(64) * 0.5, name=f"w{i}") for i in range(4)]
        optimizer = ar.optim.SGD(1e-3)

    def step(x: ar.Tensor) -> ar.Tensor:
        h = x
        for each in weights:
            h = ar.ops.tanh(h @ each)
        total = ar.all_reduce(ar.ops.sum(h, axis=0))
        optimizer.minimize(ar.ops.sum(ar.ops.square(h - total * 0.01), axis=1), weights)
        return total

    (batch,) = strategy.distribute_dataset([(np.ones((40, 64)),)])
    raising = False

    def handler(*_: object) -> None:
        if raising:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    hits, draw = 0, random.Random(3)
    for _ in range(60):
        raising = True
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 8e-3))
            strategy.run(step, args=batch, eagerly=eagerly)
            raising = False
        except KeyboardInterrupt:
            raising = False
            hits += 1
        one, other = strategy.run(step, args=batch, eagerly=eagerly).values
        assert (one == other).all()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert all((each.storage[0] == each.storage[1]).all() for each in weights)
    print(hits)


@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
def test_an_interrupted_step_leaves_replicas_usable_and_equal(eagerly: bool) -> None:
    (result,) = run_ranks(interrupted, 1, arguments=[eagerly], timeout=40)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 5
