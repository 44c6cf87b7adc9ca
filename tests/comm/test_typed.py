"""The texts that stand for calls of lists and factors."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from allreduce.comm import long_lists, typed
from allreduce.comm.checks import Context, Options

CONTEXT = Context("all_reduce", "[shared] rank 0", "group", 0, 2)


def test_a_call_of_one_array_without_factors_needs_none() -> None:
    assert not typed.of_array("all_reduce", np.dtype("f4"), (2, 3), Options("sum"))


def test_a_call_reads_as_it_was_written() -> None:
    options = Options("mean", 1, scale=(0.5, 1.0))
    text = typed.of_array("reduce", np.dtype("f4"), (2, 3), options)
    assert text == "reduce(float32[2, 3], op='mean', root=1, prescale=0.5)"
    items = [np.ones((2, 2), "i4"), np.array(1.0)]
    text = typed.of_list(CONTEXT, items, Options("sum"))
    assert text == "all_reduce([int32[2, 2], float64[]], op='sum')"


def test_long_lists_are_told_apart_in_few_bytes() -> None:
    items = [np.ones(n) for n in range(500)]
    texts = {typed.of_list(CONTEXT, items[:n], Options("sum")) for n in (498, 499, 500)}
    texts.add(typed.of_list(CONTEXT, items[::-1], Options("sum")))
    assert len(texts) == 4
    assert all(len(text) <= long_lists.TEXT_BYTES for text in texts)


@pytest.mark.parametrize("first", [0, 77, 490])
def test_the_texts_of_two_long_lists_tell_about_where_they_first_differ(first: int) -> None:
    kinds = ["float32[10]"] * 500
    odd = kinds[:first] + ["float32[11]"] * (500 - first)
    texts = [long_lists.spell("all_reduce", each, ", op='sum'") for each in (kinds, odd)]
    long_lists.remember(texts[1], odd)  # the other one is of another process
    told = long_lists.difference(texts, ("on rank 0", "here"))
    found = re.match(r"the first that differs is among items (\d+) to (\d+), which are ", told)
    assert found is not None
    low, high = (int(each) for each in found.groups())
    assert low <= first <= high <= low + 50
    assert told.endswith(f"float32[{10 + (first <= high)}] here")


def test_a_list_of_few_large_shapes_tells_the_very_array() -> None:
    kinds = [f"float32[{n}, 2, 3, 4, 5, 6]" for n in range(9)]
    texts = [long_lists.spell("broadcast", kinds, ", root=0")]
    kinds[3] = "float32[7]"
    texts.append(long_lists.spell("broadcast", kinds, ", root=0"))
    assert long_lists.difference(texts, ("here", "on rank 1")) == "item 3 differs"
    long_lists.remember(texts[1], kinds)
    told = long_lists.difference(texts, ("on rank 0", "here"))
    assert told == "item 3 is float32[7] here"


def test_lists_that_differ_in_their_factors_have_no_array_that_differs() -> None:
    kinds = ["float32[10]"] * 50
    texts = [long_lists.spell("all_reduce", kinds, f", op='sum', prescale={n}") for n in (0.5, 1.5)]
    assert not long_lists.difference(texts, ("here", "on rank 1"))
    assert [long_lists.items(text) for text in texts] == [50, 50]
    assert all("prescale=" in long_lists.without_mark(text) for text in texts)
    assert all(len(text) <= long_lists.TEXT_BYTES for text in texts)


@pytest.mark.parametrize(("one", "other"), [(0.5, 1.0), (0.25, (1 + 2j)), (-1e-300, 1 / 3)])
@pytest.mark.parametrize("count", [1, 50])
def test_the_factors_of_lists_that_differ_in_one_are_told(
    one: complex, other: complex, count: int
) -> None:
    items = [np.ones(10, "c16")] * count
    scales = ((1.0, one), (1.0, other))
    texts = [typed.of_list(CONTEXT, items, Options("sum", scale=scale)) for scale in scales]
    told = long_lists.factors(texts, ("here", "on rank 1"))
    assert told == f"postscale is {one!r} here and {other!r} on rank 1"
    assert not long_lists.factors(texts[:1] * 2, ("here", "on rank 1"))


def test_a_factor_that_a_text_has_no_room_for_is_not_told() -> None:
    items = [np.ones(10, "c16")] * 50
    third = complex(1 / 3, 2 / 3)
    scales = [(third, factor) for factor in (1, third, 2 * third)]
    texts = [typed.of_list(CONTEXT, items, Options("sum", scale=scale)) for scale in scales]
    assert len(set(texts)) == 3
    assert not any(long_lists.factors(pair, ("", "")) for pair in itertools.combinations(texts, 2))


@pytest.mark.parametrize("odd", [0, 77, 100])
def test_the_only_array_that_differs_in_a_long_list_is_told(odd: int) -> None:
    kinds = ["float32[3000000]"] + ["float32[10]"] * 100
    texts = [long_lists.spell("all_reduce", kinds, ", op='sum'")]
    kinds[odd] = "float32[11]"
    texts.append(long_lists.spell("all_reduce", kinds, ", op='sum'"))
    long_lists.remember(texts[1], kinds)  # the other one is of another process
    told = long_lists.difference(texts, ("on rank 0", "here"))
    assert told == f"item {odd} is float32[11] here"
