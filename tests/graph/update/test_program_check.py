"""Ranks whose variables differ learn which one, and how; equal ones go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.errors import MismatchError
from allreduce.graph import Variable
from allreduce.graph.update.program_check import check_same
from tests.harness import run_ranks, run_threads, settle_threads

KERNEL = ("m/0/kernel", (5, 8), "float32")
BIAS = ("m/0/bias", (8,), "float32")
SHOWN = "variable 0 of the step is 'm/0/kernel', float32 (5, 8), on ranks 0, 1"


def made(rows: Sequence[tuple[str, tuple[int, ...], str]]) -> list[Variable]:
    return [Variable(np.zeros(shape, dtype), name=name) for name, shape, dtype in rows]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (
            [("m/0/kernel", (5, 9), "float32"), BIAS],
            f"{SHOWN} but 'm/0/kernel', float32 (5, 9), on",
        ),
        (
            [("m/0/kernel", (5, 8), "float64"), BIAS],
            f"{SHOWN} but 'm/0/kernel', float64 (5, 8), on",
        ),
        (
            [KERNEL, ("m/1/bias", (8,), "float32")],
            "on ranks 0, 1 but 'm/1/bias', float32 (8,), on ",
        ),
        ([KERNEL], "variable 1 of the step is 'm/0/bias', float32 (8,), on ranks 0, 1 but missing"),
        ([KERNEL, BIAS, ("é" * 99, (1,), "int64")], "variable 2 of the step is missing on ranks 0"),
    ],
)
def test_the_first_difference_is_named_on_all(
    theirs: list[tuple[str, tuple[int, ...], str]], said: str
) -> None:
    def member(comm: Communicator) -> float:
        variables = made(theirs if comm.rank == 2 else [KERNEL, BIAS])
        with pytest.raises(MismatchError) as caught:
            check_same(comm, comm.rank, variables)
        assert said in str(caught.value)
        assert str(caught.value).startswith(f"rank {comm.rank}: ")
        return float(comm.all_reduce(1.0))  # it is still alive

    assert settle_threads(member, 3) == [3.0] * 3


def test_a_models_own_number_may_differ() -> None:
    def member(comm: Communicator) -> None:
        check_same(comm, comm.rank, made([(f"sequential_{comm.rank}/0/kernel", (2,), "float32")]))

    run_threads(member, 3)


def _other_widths() -> None:
    from typing import Any

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs

    strategy = ar.MultiWorkerMirroredStrategy()
    if strategy.communicator.rank == 0:
        ar.nn.Sequential([ar.nn.Dense(3)])  # a number more for the names on this rank
    with strategy.scope():
        same = ar.nn.Sequential([ar.nn.Dense(3)])
        other = ar.nn.Sequential([ar.nn.Dense(8 + strategy.communicator.rank), ar.nn.Dense(3)])

    def said(fn: Any, *args: Any) -> None:
        try:
            strategy.run(fn, args)
            print("went on")
        except ar.MismatchError as error:
            print(error)

    x, y = blobs(20)
    for model in (same, other):
        model.build((None, x.shape[1]))
        optimizer = ar.optim.SGD(0.1)

        @ar.function
        def step(x, y, model=model, optimizer=optimizer):  # type: ignore[no-untyped-def]
            loss = ar.nn.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            optimizer.minimize(loss, model.trainable_variables)

        said(step, x, y)

    def summed(x):  # type: ignore[no-untyped-def]
        return ar.all_reduce(ar.ops.sum(x))

    def doubled(x):  # type: ignore[no-untyped-def]
        return ar.all_reduce(ar.ops.sum(x) * 2.0)

    rank = strategy.communicator.rank
    for lengths in ((2, 3), (3, 3), (4, 2)):  # the second one rank has traced already
        for fn in (summed, doubled):
            ones = ar.PerReplica((np.ones((2, lengths[rank])),))
            print(float(strategy.local_results(strategy.run(fn, args=(ones,)))[0]), end=" ")
    print()
    (batch,) = strategy.distribute_dataset([np.ones((4, 5))])
    strategy.run(summed, args=(batch,))
    with strategy.scope():  # one of them knows it already, and one has run something else since
        if rank == 0:
            ar.function(lambda x: x)(x)
        ar.function(summed).graph(ar.PerReplica((np.ones((2, (9, 3)[rank])),)))
    with strategy.scope():
        average = ar.Variable(np.ones(2), name="average")

    def decayed(factor):  # type: ignore[no-untyped-def]
        average.assign(average * factor if factor < 0.7 else average + 1.0)

    said(decayed, (0.5, 0.9)[rank])
    said((summed, doubled)[rank], ones)
    ar.set_seed(rank)
    said(lambda: average.assign(average + ar.ops.normal((2,))))


def test_ranks_that_differ_say_how_and_those_that_do_not_go_on() -> None:
    for rank, result in enumerate(run_ranks(_other_widths, 2)):
        assert result.returncode == 0, result
        trained, error, sums, assigned, mixed, drawn = result.stdout.splitlines()
        assert drawn.startswith(f"rank {rank}: operation ")
        assert "call ar.set_seed with one number on every rank, and draw as often on all" in drawn
        assert assigned.startswith(f"rank {rank}: operation ")
        assert sums.split() == ["10.0", "20.0", "12.0", "24.0", "12.0", "24.0"]
        assert mixed.startswith(f"rank {rank}: operation ")
        assert "on rank 0 but " in mixed
        assert trained == "went on"
        assert error.startswith(
            f"rank {rank}: variable 0 of the step is 'sequential_2/0/kernel', f"
        )
        assert "8), on rank 0 but 'sequential_1/0/kernel', float32 (" in error
        assert "9), on rank 1; make the same model" in error
