"""Ranks that compute alike from values of their own lay out and exchange gradients in one order."""

from __future__ import annotations

import json

import numpy as np

from tests.harness import run_ranks


def orders() -> None:
    import json
    from typing import Any

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank, ops = strategy.communicator.rank, ar.ops

    def trained(factor: float, between: bool = False, **how: Any) -> list[list[float]]:
        with strategy.scope():
            first = ar.Variable(np.full(3, 2.0), name="m/first")
            second = ar.Variable(np.full(3, 3.0), name="m/second")
            optimizer = ar.optim.SGD(1.0)

        def step(x: Any) -> None:
            scaled = second * factor  # for a factor of 1 it is left out of the program
            h = ops.tanh(first)
            loss = ops.sum(x * (h * scaled), axis=1)
            if between:
                loss = loss + 0.0 * ar.all_reduce(ops.sum(h) * ops.sum(x))
            optimizer.minimize(loss, [first, second])

        ones = (ar.PerReplica((np.ones((2, 3)),)),)
        strategy.run(lambda x: x * first * second, args=ones)  # from here on they share values
        strategy.run(step, args=ones, **how)
        return [(2 - first.numpy()).tolist(), (3 - second.numpy()).tolist()]

    found = [trained(1.0 + rank), trained(1.0 + rank, between=True)]
    found.append(trained(1.0, eagerly=rank == 0))
    ar.config.enable_check_numerics(rank == 0)
    found.append(trained(1.0))
    ar.config.enable_check_numerics(False)
    for name in ("simplify", "fuse"):
        ar.config.passes[name] = rank == 0
        found.append(trained(1.0, between=True))
        ar.config.passes[name] = True
    print(json.dumps(found))


def rearranged() -> None:
    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        a, b = (ar.Variable(np.ones(3), name=f"m/{name}") for name in "ab")
        optimizer = ar.optim.SGD(1.0)

    def step(x: ar.Tensor, swapped: bool) -> None:
        both = ar.ops.stop_gradient(ar.ops.sum(a) + ar.ops.sum(b))
        one, other = (b, a) if swapped else (a, b)
        product = ar.ops.tanh(one * 2.0) * (other * 3.0) + both
        optimizer.minimize(ar.ops.sum(x * product, axis=1), [a, b])

    ones = ar.PerReplica((np.ones((2, 3)),))
    for swapped in (rank == 1, False):
        try:
            strategy.run(step, args=(ones, swapped))
        except ar.MismatchError as error:
            print(error)
    print((a.numpy() == 1).all() and (b.numpy() == 1).all())


def test_gradients_meet_their_own_whatever_a_rank_computes_from_its_own_values() -> None:
    results = run_ranks(orders, 2)
    for result in results:
        assert result.returncode == 0, result.stderr
    zero, one = (json.loads(result.stdout.splitlines()[-1]) for result in results)
    first, second = (1 - np.tanh(2.0) ** 2) * 3, np.tanh(2.0)
    for case, (mine, others) in enumerate(zip(zero, one, strict=True)):
        factor = 1.5 if case < 2 else 1.0
        np.testing.assert_allclose(mine, [[factor * first] * 3, [factor * second] * 3], rtol=1e-12)
        assert mine == others, case


def test_variables_laid_out_by_steps_that_differed_are_never_mixed() -> None:
    for rank, result in enumerate(run_ranks(rearranged, 2)):
        assert result.returncode == 0, result.stderr
        differed, laid_out, untouched = result.stdout.splitlines()
        assert differed.startswith(f"rank {rank}: operation ")
        assert laid_out.startswith(
            f"rank {rank}: variable 0 of the optimizer's first step is 'm/b' on rank 0 but 'm/a' "
        )
        assert untouched == "True"
