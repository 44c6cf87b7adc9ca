"""Ranks update large buckets in slices, and one alone can save what all of them have."""

from __future__ import annotations

import json

import pytest

from tests.harness import run_ranks


def _ranks(dead: int, clips: bool) -> None:
    """Train in slices on several ranks, and plainly, and look at the state from rank 0 alone."""
    import json
    import os
    from typing import Any

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    communicator = strategy.communicator
    rank = communicator.rank

    def make() -> Any:
        with strategy.scope():
            w = ar.Variable(np.linspace(-1, 1, 300 * 401).reshape(300, 401), name="m/w")
            optimizer = ar.optim.Adam(0.01, clip_norm=0.5 if clips else None)

        @ar.function
        def step(x: Any) -> None:
            optimizer.minimize(ar.ops.sum(ar.ops.square(ar.ops.tanh(x @ w)), axis=1), [w])

        x = np.random.default_rng(rank).normal(size=(2 + rank, 300))
        return w, optimizer, lambda: strategy.run(step, args=(x,)), step

    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        rounding = 1e-9 if clips else 0  # slices add up to another norm
        return all(np.allclose(one[key], other[key], rounding, 0) for key in one)

    found = []
    ar.config.passes["shard"] = False
    w, optimizer, run, step = make()
    for _ in range(3):
        run()
    plain, wanted = w.numpy(), optimizer.state()
    ar.config.passes["shard"] = True
    w, optimizer, run, step = make()
    for _ in range(3):
        run()
    latest = strategy.latest(step)
    found.append(latest is not None and "update_slices" in str(latest.graph))
    found.append(same({"w": w.numpy()}, {"w": plain}))
    before = optimizer.state() if rank == 0 else {}  # which takes no communication
    found.append(rank != 0 or same(before, wanted))
    if rank:  # while rank 0 may still be looking
        optimizer.load_state({key: np.full_like(value, 3) for key, value in wanted.items()})
    communicator.barrier()
    found.append(rank != 0 or same(optimizer.state(), wanted))
    if rank:
        optimizer.load_state(wanted)
    run()
    four = optimizer.state()
    optimizer.learning_rate = 0.5 if rank else 0.25
    try:
        run()
    except ar.MismatchError as error:
        found.append("the optimizer is Adam(learning_rate=0.25" in str(error))
    found.append(same(optimizer.state(), four))
    optimizer.learning_rate = 0.01
    if dead:
        if rank == 1:
            os._exit(0)
        try:
            run()
        except ar.PeerLostError:
            found.append(same(optimizer.state(), four))
    else:
        run()
        five = optimizer.state()
        strategy.close()
        communicator.close()
        found.append(same(optimizer.state(), five))
    print(json.dumps([found, w.numpy().sum()]))


@pytest.mark.parametrize(
    ("size", "dead", "clips"), [(2, 0, False), (3, 0, False), (2, 1, False), (3, 0, True)]
)
def test_ranks_update_in_slices_and_one_alone_knows_the_state(
    size: int, dead: int, clips: bool
) -> None:
    results = run_ranks(_ranks, size, arguments=[dead, clips])
    if dead:
        del results[1]
    for result in results:
        assert result.returncode == 0 or dead, result.stderr
        found, total = json.loads(result.stdout)
        assert found == [True] * 7, result.stderr
        assert total == json.loads(results[0].stdout)[1]
