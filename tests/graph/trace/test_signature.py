"""What makes two calls of a traced function alike, and what is said when they rarely are."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from allreduce.devices import lookup
from allreduce.errors import UsageError
from allreduce.graph import PerReplica, Tensor, default_replicator, function, ops
from allreduce.graph.core import pass_switches, seed
from tests.harness import collector_off


@dataclass(frozen=True)
class Batch:
    images: Any
    rest: dict[str, Any] = field(default_factory=dict)
    training: bool | None = True


def test_dataclasses_are_taken_apart_and_come_back() -> None:
    traces = []

    @function
    def double(batch: Batch) -> Batch:
        traces.append(batch.training)
        return Batch(batch.images * 2, {"labels": [batch.rest["labels"] + 1]}, training=None)

    for _ in range(2):
        result = double(Batch(np.ones(2), {"labels": np.zeros(3)}))
    assert isinstance(result, Batch)
    np.testing.assert_array_equal(result.images.numpy(), [2, 2])
    np.testing.assert_array_equal(result.rest["labels"][0].numpy(), [1, 1, 1])
    assert result.training is None
    double(Batch(np.ones(2), {"labels": np.zeros(3)}, training=False))
    assert traces == [True, False]


@dataclass
class Branch:
    is_leaf: bool
    weight: Any


def test_a_dataclass_may_have_fields_of_any_name() -> None:
    found = function(lambda branch: Branch(branch.is_leaf, branch.weight * 2))(
        Branch(True, np.ones(2))
    )
    np.testing.assert_array_equal(found.weight.numpy(), [2, 2])


@dataclass(frozen=True)
class State:
    x: Any
    name: str
    apply: Any = np.tanh


def test_defaults_are_the_functions_own() -> None:
    traces = []
    table = np.ones(2)

    class Owner:
        @function
        def step(self, x: Tensor, y: int = 1, rows: Any = table, *, z: Any = (2, None)) -> Any:
            traces.append((y, z, list(rows)))  # a default array has its values here
            return x * y * z[0]

    owner, x = Owner(), np.ones(2)
    for _ in range(2):
        np.testing.assert_array_equal(owner.step(x).numpy(), [2, 2])
    assert traces == [(1, (2, None), [1, 1])]
    for _ in range(2):
        np.testing.assert_array_equal(owner.step(y=1, x=x, z=(3, None)).numpy(), [3, 3])
    assert len(traces) == 2
    with pytest.raises(UsageError, match="unexpected keyword argument 'w'"):
        owner.step(x, w=1)


def test_a_call_is_compared_with_the_latest_one_in_all_that_counts() -> None:
    traces: list[tuple[Any, ...]] = []

    @function
    def step(x: Tensor, y: Any) -> Any:
        traces.append(
            (x.shape, x.dtype.name, isinstance(y, Tensor), len(pass_switches.switched_off()))
        )
        return x * y

    ones, wide = np.ones(2, "float32"), np.ones((3, 2), "float32")
    for x, y in [(ones, ones), (ones, 2), (ones, ones), (wide, ones), (ones.astype("int64"), ones)]:
        for factor in (1, 2):  # new values each time, in an array of the same look
            np.testing.assert_array_equal(step(x * factor, y).numpy(), x * factor * y)
    pass_switches.switch("fuse", False)
    try:
        step(ones.astype("int64"), ones)
    finally:
        pass_switches.switch("fuse", True)
    assert traces == [
        *(((2,), "float32", True, 0), ((2,), "float32", False, 0), ((3, 2), "float32", True, 0)),
        *(((2,), "int64", True, 0), ((2,), "int64", True, 1)),
    ]


def test_a_default_that_is_a_dataclass_is_the_functions_own() -> None:
    @dataclass(eq=False)
    class Traces:
        count: int = 0

    alone, nested = Traces(), Traces()

    @function
    def step(x: Tensor, one: Traces = alone, others: Any = (nested, 2)) -> Any:
        one.count += 1
        others[0].count += 1
        return x * others[1]

    for rows in (1, 2, 2):
        step(np.ones(rows))
    assert alone.count == nested.count == 2


def test_dicts_are_gone_through_in_the_order_of_each_call() -> None:
    @function
    def step(parts: dict[str, Tensor], **rest: Tensor) -> Any:
        parts = {**parts, **rest}
        total = sum(value * float(10**i) for i, value in enumerate(parts.values()))
        return {"total": total, **parts}

    one, two = np.ones(2), np.full(2, 2.0)
    for _ in range(2):
        for parts, wanted in (({"a": one, "b": two}, 121), ({"b": two, "a": one}, 112)):
            result = step(parts, c=one)
            assert list(result) == ["total", *parts, "c"]
            np.testing.assert_array_equal(result["total"].numpy(), [wanted] * 2)
    step({1: one, "a": two, "b": one}, c=one)  # of keys that do not compare


def test_what_is_no_number_is_returned_as_it_is() -> None:
    @function
    def step(state: State) -> Any:
        rest = OrderedDict(b=state.x, a=b"bytes"), defaultdict(list, {"rows": [state.x, Any]})
        return replace(state, x=state.x + 1), rest

    for _ in range(2):
        state, (ordered, made) = step(State(np.ones(2), "n"))
    np.testing.assert_array_equal(state.x.numpy(), [2, 2])
    assert (state.name, state.apply) == ("n", np.tanh)
    assert type(ordered) is OrderedDict
    assert list(ordered) == ["b", "a"]
    assert ordered["a"] == b"bytes"
    assert made["none"] == []
    assert made["rows"][1] is Any
    for wrong in ({1, 2}, (i for i in range(2)), np.array(["text"])):
        with pytest.raises(UsageError, match="cannot make a tensor"):
            function(lambda x, wrong=wrong: (x, wrong))(np.ones(2))


def test_a_python_value_that_changes_all_the_time_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @function
    def step(x: Tensor, settings: dict[str, float]) -> Tensor:
        return x * settings["rate"]

    for i in range(8):
        step(np.ones(3), {"rate": 0.5 + i})
    (record,) = caplog.records
    assert "step was traced in 5 of its last 5 calls" in record.getMessage()
    assert "args[1]['rate'] was 3.5 and is now 4.5" in record.getMessage()
    assert "numbers that change as np.float32(...)" in record.getMessage()


def test_an_array_whose_shape_changes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    @function
    def step(batch: Batch, scale: Tensor) -> Any:
        return batch.images * scale

    for i in range(6):
        step(Batch(np.ones(3)), scale=np.ones(3))
        step(Batch(np.ones(i)), scale=np.ones(1))
    assert not caplog.records  # every other call found its trace
    for i in range(9, 14):
        step(Batch(np.ones(i)), scale=np.ones(1))
    (record,) = caplog.records
    assert "args[0].images was float64(10,) and is now float64(11,)" in record.getMessage()


def test_what_was_switched_is_named(caplog: pytest.LogCaptureFixture) -> None:
    @function
    def step(x: Tensor) -> Tensor:
        return x * 2

    try:
        for name in pass_switches.OPTIONAL:
            pass_switches.switch(name, False)
            step(np.ones(3))
    finally:
        for name in pass_switches.OPTIONAL:
            pass_switches.switch(name, True)
    (record,) = caplog.records
    assert record.getMessage().endswith("a setting of ar.config or the seed changes")


def test_a_function_made_anew_at_each_call_is_named(caplog: pytest.LogCaptureFixture) -> None:
    @function
    def step(x: Tensor, times: int) -> Tensor:
        return x * times

    replicator = default_replicator()
    for i in range(6):
        replicator.run(lambda x: step(x, 2), (np.ones(3),))
        replicator.run(functools.partial(step, times=2), (np.ones(3),))
        used = function(lambda x: x)
        for _ in range(3 if i == 2 else 1):  # that one was worth its trace
            used(np.ones(3))
    first, second = [record.getMessage() for record in caplog.records]
    assert "<lambda> was traced in 5 of its last 5 calls" in first
    assert "the function is made anew at each call; make it once" in first
    assert "functools.partial" in second


@dataclass(slots=True)
class Slotted:
    by: float

    @function
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.by

    @function
    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        return x * 2


class Pair(NamedTuple):
    one: float
    other: float

    @function
    def total(self, x: Tensor) -> Tensor:
        return x * (self.one + self.other)


def test_what_knows_no_weak_references_can_be_traced() -> None:
    for by in (2.0, 3.0, 4.0):  # an id is never taken for that of a former one
        assert Slotted(by).scaled(np.ones(1)).numpy() == by
        assert Pair(by, 1.0).total(np.ones(1)).numpy() == by + 1
    assert Slotted(1.0).doubled(np.ones(1)).numpy() == Slotted.doubled(np.ones(1)).numpy() == 2
    assert function(np.exp)(np.zeros(1)).numpy() == 1


def test_a_seed_is_part_of_the_signature_once_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "_seed", None)
    monkeypatch.setattr(seed, "_drawn", False)
    traces = []

    @function
    def step(x: Tensor) -> Tensor:
        traces.append(seed.get_seed())
        return x + ops.normal((3,))

    for _ in range(2):  # the first one draws a seed
        step(np.ones(3))
    assert len(traces) == 1
    for number in (1, 2, 2, 1):
        seed.set_seed(number)
        for _ in range(2):
            step(np.ones(3))
    assert traces[1:] == [1, 2, 1]
    step(np.ones(1))
    programs = default_replicator()._programs.of(step.python_function)
    assert len(programs.by_signature) == 2  # those of the last seed alone


def test_programs_of_former_seeds_let_go_of_their_memory_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seed, "_seed", 0)
    monkeypatch.setattr(seed, "_drawn", False)
    traceable = True

    @function
    def step(x: Tensor) -> Tensor:
        if not traceable:
            raise KeyError
        return ops.sum(x @ x + 1.0)

    memory, used = lookup("CPU:0").memory, []
    with collector_off():  # frames and their steps know each other
        for number in (1, 2, 3):
            seed.set_seed(number)
            step(np.ones((64, 64)))
            used.append(memory.used)
    assert used == used[:1] * 3
    traceable = False
    seed.set_seed(4)
    with pytest.raises(KeyError):
        step(np.ones((64, 64)))
    assert default_replicator().latest(step) is None  # a released one tells nothing


def test_the_first_calls_arrays_are_let_go() -> None:
    step = function(lambda x: x * 2)
    given = np.ones(3)
    watch = weakref.ref(given)
    step(given)
    del given
    assert watch() is None


def test_few_signatures_are_nothing_to_speak_of(caplog: pytest.LogCaptureFixture) -> None:
    @function
    def step(x: Tensor, training: bool) -> Tensor:
        return x if training else -x

    for rows in (1, 2):
        for training in (True, False):
            for _ in range(3):
                step(np.ones(rows), training)
    assert not caplog.records


@pytest.mark.parametrize("given", [np.ones(2, complex), PerReplica((np.ones(2, complex),))])
def test_an_array_that_steps_cannot_take_is_told_with_the_line(given: Any) -> None:
    said = r"test_signature\.py:\d+: an argument .* take arrays of floats, integers and booleans"
    with pytest.raises(UsageError, match=said):
        default_replicator().run(lambda x: x * 2, (given,))
