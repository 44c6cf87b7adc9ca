"""What ranks bring to a step is compared by what it comes to, and as cheaply for large batches."""

from __future__ import annotations

import numpy as np
import pytest

from allreduce.graph.consistency.rank_check import difference
from allreduce.graph.trace.rank_digest import BatchDigest, RankDigest
from allreduce.graph.trace.variable import Variable


def _kept(*variables: Variable) -> RankDigest:
    made = RankDigest()
    made.involve(variables)
    return made


def _assign(made: RankDigest, variable: Variable, value: float, where: str) -> None:
    made.assign(variable, np.full(3, value, np.float32), where)
    variable.storage[0][...] = value


def test_a_dataset_that_is_shorter_on_one_rank_is_told() -> None:
    rows = np.ones((2, 3))
    began, went_on = RankDigest(), RankDigest()
    began.batch_digests, went_on.batch_digests = (
        (BatchDigest.of(rows, 0),),
        (BatchDigest.of(rows, 3),),
    )
    assert difference({0: went_on.facts(), 1: began.facts()}).startswith(
        "array 0 from distribute_dataset is batch 3 (counted from 0) of a dataset, float64 (2, 3) "
        "on rank 0 but batch 0 (counted from 0) of a dataset, float64 (2, 3) on rank 1; strategy."
    )


def test_equal_values_count_however_a_variable_has_come_to_them() -> None:
    mine, other, theirs = (Variable(np.zeros(3, np.float32), name="m/w") for _ in range(3))
    once, often = _kept(mine), _kept(theirs)
    _assign(once, mine, 2, "a.py:1")
    _assign(often, theirs, 1, "b.py:1")
    assert once.digest != often.digest
    _assign(often, theirs, 2, "b.py:2")
    assert once.digest == often.digest != 0
    assert [fact.key for fact in once.facts().values()] == [
        fact.key for fact in often.facts().values()
    ]
    _assign(once, mine, 0, "a.py:2")
    _assign(once, other, 1, "a.py:3")  # which the step does nothing with
    assert once.digest == 0
    assert difference({0: once.facts(), 1: often.facts()}).startswith(
        "variable 0 of the step, assigned between steps, has one value ('m/w', assigned at a.py:2) "
        "on rank 0 but another ('m/w', assigned at b.py:2) on rank 1; call assign"
    )


def test_an_assignment_to_another_variable_is_another_one() -> None:
    found = []
    for place in range(2):
        variables = [Variable(np.zeros(3, np.float32), name="m/w") for _ in range(2)]
        made = _kept(*variables)
        _assign(made, variables[place], 1, "")
        found.append(made.digest)
    assert found[0] != found[1]


ROWS = np.arange(40 * 28 * 28, dtype=np.float32).reshape(40, 28, 28)


@pytest.mark.parametrize(
    ("other", "number"),
    [
        (ROWS, 1),
        (ROWS[:-1], 0),
        (ROWS[::-1], 0),
        (ROWS.astype(np.int32), 0),
        (ROWS.reshape(40, -1), 0),
        (np.concatenate([ROWS[:1], ROWS[1:-1][::-1], ROWS[-1:]]), 0),
        (np.concatenate([ROWS[:20], ROWS[21:], ROWS[20:21]]), 0),
    ],
)
def test_batches_that_differ_have_other_marks(other: np.ndarray, number: int) -> None:
    assert (
        BatchDigest.of(other, number)
        != BatchDigest.of(ROWS, 0)
        == BatchDigest.of(np.asfortranarray(ROWS), 0)
    )


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1,), (70_000,), (2, 3, 5, 7)])
def test_a_batch_of_any_shape_has_a_mark(shape: tuple[int, ...]) -> None:
    made = [BatchDigest.of(np.full(shape, value), 0) for value in (1.0, 2.0)]
    assert (made[0] == made[1]) == (0 in shape)
    sizes = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    assert made[0].fact.shown == f"batch 0 (counted from 0) of a dataset, float64 {sizes}"
