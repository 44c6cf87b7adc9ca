"""Ranks whose steps or optimizers differ find out before anything is updated."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.graph import gradients, scan
from allreduce.graph.consistency.rank_check import Fact, Facts, difference
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import apply
from allreduce.graph.trace.rank_digest import RankDigest
from allreduce.graph.update.program_check import summary
from allreduce.graph.update.step_checksum import StepChecksum
from allreduce.reduction import lay_out
from tests.graph.interpret import record
from tests.harness import run_ranks, script_of


def brought(strategy: Any) -> list[str]:
    """Say what becomes of steps to which ranks bring the same, and something of their own."""
    import allreduce as ar

    rank, ops = strategy.communicator.rank, ar.ops
    with strategy.scope():
        kept = ar.Variable(np.ones(3), name="m/kept")

    def step(x: Any) -> Any:
        return ar.all_reduce(ops.sum(x * kept))

    def one(value: Any, eagerly: bool = False) -> str:
        try:
            strategy.run(step, args=(value,), eagerly=eagerly)
        except ar.MismatchError as error:
            return str(error)
        return ""

    def batches(*own: np.ndarray, number: int = 3) -> list[str]:
        dataset = strategy.distribute_dataset([np.ones((5, 3)), *own, np.ones((4, 3))])
        made = zip(range(number), dataset, strict=False)
        return [one(batch, eagerly) for _, batch in made for eagerly in (False, True)]

    x, rows = np.ones(3), np.arange(600.0).reshape(200, 3)
    kept.assign(x * (2 + rank))  # no step has met it: it gets rank 0's value
    told = [one(x)]
    if rank:
        kept.assign(x * 7)
    told += [one(x), one(x, eagerly=True)]
    for _ in range(2 - rank):  # who has other calls but equal values does the same
        kept.assign(x * 5)
    return [
        *(*told, one(x)),
        *batches(rows),
        *batches(rows[::-1] if rank else rows),
        *batches(rows[rank:]),
        *batches(*[rows] * rank, number=2),
    ]


def steps() -> None:
    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank, ops = strategy.communicator.rank, ar.ops

    def run(at: int = 9, dtype: str = "float32", rate: float = 0.5, **own: Any) -> Any:
        """Take four steps; what is `own` holds for rank 1, from step `at` on."""
        with strategy.scope():
            weights = ar.Variable(np.ones(3, dtype), name="m/weights")
            names = ("seen", "other", "unused")
            seen, other, unused = (ar.Variable(np.zeros(3), name=f"m/{name}") for name in names)
            optimizer = own["optimizer"] if rank and "optimizer" in own else ar.optim.SGD(0.5)

        @ar.function
        def step(x: Any) -> Any:
            y = ops.tanh(x * weights) if rank and "tanh" in own else ops.relu(x * weights)
            loss = ops.mean(ops.dropout(y, rate), axis=-1)
            (other if rank and "assigned" in own else seen).assign(seen + other)
            optimizer.minimize(loss, [weights])
            return (loss, y) if rank else loss  # what is only looked at may differ

        rows = 2 + rank  # and so may the rows, and what they are
        for number in range(4):
            if number == at and rank and "learning_rate" in own:
                optimizer.learning_rate = own["learning_rate"]
            if number == at and rank and "iterations" in own:
                optimizer.load_state({"iterations": np.asarray(own["iterations"])})
            if number == at and rank and "value" in own:
                seen.assign(own["value"])
                unused.assign(own["value"])
            before = weights.numpy()
            try:
                strategy.run(step, args=(np.full((rows, 3), rank + 1, dtype),))
            except ar.MismatchError as error:
                assert (weights.numpy() == before).all()
                return [number, str(error)]
        return weights.numpy().tolist()

    def exchange(x: Any) -> Any:
        return ar.all_reduce(ops.sum(ops.tanh(x) if rank else ops.relu(x), axis=0))

    def exchanged(*own: np.ndarray) -> Any:
        x = own[0] if rank and own else np.ones((2, 3))
        try:
            strategy.run(exchange, args=(x,))
        except ar.MismatchError as error:
            return [0, str(error)]
        raise AssertionError("values of other meanings were added")

    found = [
        run(),
        run(dtype="float64"),
        run(optimizer=ar.optim.Adam(0.5)),
        run(tanh=True),
        run(rate=0.5 + rank / 4),
        run(assigned=True),
        run(at=2, learning_rate=0.25),
        run(at=2, iterations=40),
        run(at=2, value=np.full(3, 8.0)),
        exchanged(),
        exchanged(np.ones((2, 3), np.float32)),
        exchanged(np.ones((4, 3, 1))),
    ]
    told = brought(strategy)
    print(json.dumps([found, told, float(strategy.communicator.all_reduce(1.0))]))


KEPT = "variable 0 of the step, assigned between steps, has one value ('m/kept', not assigned) on "
OTHER = "array 0 from distribute_dataset"
BATCH_1 = "is batch 1 (counted from 0) of a dataset, float64"
TOLD = [
    *("", KEPT, KEPT, ""),
    *[""] * 6,
    *("", "", *[f"{OTHER}, {BATCH_1[3:]} (200, 3), has one value on rank 0 but another"] * 2),
    *[""] * 4,
    *[f"{OTHER} {BATCH_1} (200, 3) on rank 0 but {BATCH_1[3:]} (199, 3) on rank 1; "] * 2,
    *[""] * 4,
    *[f"{OTHER} {BATCH_1} (4, 3) on rank 0 but {BATCH_1[3:]} (200, 3) on rank 1; "] * 2,
]
NAMED = [
    (0, "the optimizer is SGD(learning_rate=0.5, momentum=0.0, nesterov=False) on rank 0 but Adam"),
    (0, "operation 3 of the step is relu("),
    (0, "operation 6 of the step is dropout("),
    (0, "operation 11 of the step is assign(%10, 'seen') int64 () ('m/seen' at "),
    (2, "the optimizer is SGD(learning_rate=0.5, momentum=0.0, nesterov=False) on rank 0 but SGD("),
    (2, "the number of steps that the optimizer has done is 2 on rank 0 but 40 on rank 1; load "),
    (2, "variable 1 of the step, assigned between steps, has one value ('m/seen', not assigned) "),
    (0, "operation 1 of the step is relu("),
    (0, "argument 0 of the step is float64 (2, 3) on rank 0 but float32 (2, 3) on rank 1; run "),
    (0, "operation 1 of the step is relu(%0) float64 (2, 3) ("),
]
SHAPES = "tanh(%0) float64 (4, 3, 1) ("


def test_steps_that_differ_are_named_by_all_before_an_update() -> None:
    imports = "import json\nfrom typing import Any\nimport numpy as np\n"
    results = run_ranks(imports + inspect.getsource(brought) + script_of(steps), 2)
    for result in results:
        assert result.returncode == 0, result.stderr
    zero, one = (json.loads(result.stdout) for result in results)
    assert zero[0][:2] == one[0][:2]  # alike, these go on
    assert zero[2] == one[2] == 2.0  # and so can those that have differed
    for rank, (found, told, _) in enumerate((zero, one)):
        for message, brings in zip(told, TOLD, strict=True):
            assert message.startswith(f"rank {rank}: {brings}" if brings else ""), message
            assert bool(message) == bool(brings), message
        for (step, message), (wanted, named) in zip(found[2:], NAMED, strict=True):
            assert step == wanted
            assert message.startswith(f"rank {rank}: {named}")
        assert SHAPES in found[-1][1]


class _Members:
    """The stamps of several members of one job, and what their numbers add up to.

    Args:
        dtype: Of the arena.
        size: How many members.
    """

    def __init__(self, dtype: str, size: int) -> None:
        communicator: Any = SimpleNamespace(size=size)
        layout = lay_out([("m/weights", (3,))], dtype)
        self.rules = [ar.optim.SGD(0.5) for _ in range(size)]
        self.brought = [RankDigest() for _ in range(size)]
        self.places = [np.zeros(layout.header - 1, dtype) for _ in range(size)]
        each = zip(self.rules, self.places, self.brought, strict=True)
        self.checksums = [
            StepChecksum({}, rule, layout, at, communicator, own) for rule, at, own in each
        ]

    def find(self, iterations: int) -> list[bool]:
        """Say of each member whether it finds a difference in this step."""
        arena: Any = SimpleNamespace(iterations=iterations, digests=b"")
        for checksum in self.checksums:
            checksum.put(arena)
        total = self.places[0].copy()
        for place in self.places[1:]:
            total += place
        return [checksum.sums != total.tobytes() for checksum in self.checksums]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [2, 3])
def test_of_many_differences_all_members_find_each(dtype: str, size: int) -> None:
    members = _Members(dtype, size)
    assert members.find(0) == [False] * size
    for number in range(1, 2000):
        members.rules[-1].learning_rate = 0.5 + number / 2000
        assert members.find(0) == [True] * size, number
    members.rules[-1].learning_rate = 0.5
    for number in range(1, 2000):
        for member, own in enumerate(members.brought):
            own._changed = number + (member == 0)  # what was assigned between steps
        assert members.find(number) == [True] * size, number


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [2, 3, 64, 1000])
def test_members_that_do_the_same_find_no_difference(dtype: str, size: int) -> None:
    members = _Members(dtype, size)
    assert not any(any(members.find(number)) for number in range(3))


def _of(said: str, argument: str, shown: str, remedy: str = "do") -> Facts:
    return {
        "argument 0 of the step": Fact(shown, "give arrays of one kind", argument),
        "operation 1 of the step": Fact(f"{said} {shown}", remedy, said, "a.py:2"),
    }


def test_the_first_fact_that_differs_is_named_with_all_ranks_and_what_may_differ_is_not() -> None:
    facts = {
        0: _of("relu", "float32", "float32 (2, 7)"),
        1: _of("tanh", "float32", "float32 (2, 9)"),
        2: _of("relu", "float32", "float32 (3, 7)"),
    }
    assert difference(facts) == (
        "operation 1 of the step is relu float32 (2, 7) (a.py:2) on ranks 0, 2 but "
        "tanh float32 (2, 9) (a.py:2) on rank 1; do"
    )
    facts[2] = _of("relu", "int64", "int64 ()")
    assert difference(facts) == (
        "argument 0 of the step is float32 (2, 7) on ranks 0, 1 but int64 () on rank 2; give "
        "arrays of one kind"
    )
    assert difference({0: {}, 1: {"x": Fact("3", "give it")}}) == (
        "x is missing on rank 0 but 3 on rank 1; give it"
    )


Step = Callable[[Tensor, Tensor], tuple[Tensor, tuple[Tensor, ...]]]


def _said(pool: Callable[[Tensor], Tensor], height: int = 8) -> list[str]:
    """List a step's operations as they are compared."""
    images = Spec((BATCH, height, 8, 4), np.dtype(np.float32))
    program = summary(record(lambda x: [apply("all_reduce", ops.sum(pool(x)), op="sum")], images))
    return [fact.key for fact in program.values()]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: ops.max_pool2d(x, 2), lambda x: ops.max_pool2d(x, (2, 3), 2)),
        (lambda x: ops.max_pool2d(x, 2), lambda x: ops.max_pool2d(x, 2, 1)),
        (
            lambda x: ops.max_pool2d(x, 2, 1, ((1, 0), (0, 0))),
            lambda x: ops.max_pool2d(x, 2, 1, ((0, 1), (0, 0))),
        ),
        (
            lambda x: ops.max_pool2d(x, 3, 2, ((1, 0), (0, 0))),
            lambda x: ops.max_pool2d(x, 3, 2, ((0, 1), (0, 0))),
        ),
        (lambda x: ops.max_pool2d(x, 3, 2, "same"), lambda x: ops.max_pool2d(x, 3, 2)),
        (lambda x: ops.top_k(x, 1)[0], lambda x: ops.top_k(x, 2)[0]),
    ],
)
def test_windows_and_counts_are_compared(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> None:
    assert _said(one) == _said(one)
    assert _said(one) != _said(other)


def test_images_of_a_ranks_own_size_are_not() -> None:
    def pool(x: Tensor) -> Tensor:
        return ops.max_pool2d(x, 3, 2, "same")

    assert _said(pool, 8) == _said(pool, 11)


def _said_of_scan(
    step: Step, length: int = 5, looked_at: int = 0, reverse: bool = False
) -> list[str]:
    """List what is compared of a scan, of its gradient, and of the sum of the first results."""

    def traced(xs: Tensor, h: Tensor) -> list[Tensor]:
        for _ in range(looked_at):
            ops.exp(h)
        after, results = scan(step, h, xs, reverse=reverse)
        loss = ops.sum(after) + ops.sum(results[0])
        return [apply("all_reduce", each, op="sum") for each in gradients(loss, [h])]

    shapes = [(length, BATCH, 3), (BATCH, 3)]
    program = summary(record(traced, *(Spec(each, np.dtype(np.float64)) for each in shapes)))
    return [fact.key for fact in program.values()]


def _summed(axis: int) -> Step:
    return lambda h, x: (ops.tanh(h + ops.sum(h * x, axis=axis, keepdims=True)), (x, h * x))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_summed(0), _summed(1)),
        (lambda h, x: (h - x, (x,)), lambda h, x: (x - h, (x,))),
        (lambda h, x: (h * x, (x, h + x)), lambda h, x: (h * x, (h + x, x))),
        (lambda h, x: (h, (h * x,)), lambda h, x: (x, (h * x,))),
        (
            lambda h, x: (scan(lambda g, _: (ops.tanh(g), None), h * x, length=2)[0], (x,)),
            lambda h, x: (scan(lambda g, _: (ops.tanh(g), None), h * x, length=3)[0], (x,)),
        ),
    ],
)
def test_what_a_scan_does_in_a_step_is_compared(one: Step, other: Step) -> None:
    assert _said_of_scan(one) == _said_of_scan(one, looked_at=2)
    assert _said_of_scan(one) != _said_of_scan(other)
    assert _said_of_scan(one) != _said_of_scan(one, reverse=True)


def test_sequences_of_a_ranks_own_length_and_results_that_are_only_looked_at_are_not() -> None:
    def more(h: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        after, results = _summed(1)(h, x)
        return after, (*results, ops.exp(h))

    assert _said_of_scan(_summed(1), 5) == _said_of_scan(_summed(1), 8)
    assert _said_of_scan(_summed(1)) == _said_of_scan(more)
