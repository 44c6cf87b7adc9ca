"""The texts that stand for calls of lists and factors."""

from __future__ import annotations

import numpy as np

from allreduce.comm.arguments import call_text
from allreduce.comm.arguments.checks import Context, Options
from allreduce.comm.calls.call import TEXT_BYTES, list_length, without_digest

CONTEXT = Context("all_reduce", "[shared] rank 0", "group", 0, 2)


def test_a_call_of_one_array_without_factors_needs_none() -> None:
    assert not call_text.of_array("all_reduce", np.dtype("f4"), (2, 3), Options("sum"))


def test_a_call_reads_as_it_was_written() -> None:
    options = Options("mean", 1, scale=(0.5, 1.0))
    text = call_text.of_array("reduce", np.dtype("f4"), (2, 3), options)
    assert text == "reduce(float32[2, 3], op='mean', root=1, prescale=0.5)"
    items = [np.ones((2, 2), "i4"), np.array(1.0)]
    text = call_text.of_list(CONTEXT, items, Options("sum"))
    assert text == "all_reduce([int32[2, 2], float64[]], op='sum')"


def test_long_lists_are_told_apart_in_few_bytes() -> None:
    items = [np.ones(n) for n in range(500)]
    texts = {call_text.of_list(CONTEXT, items[:n], Options("sum")) for n in (498, 499, 500)}
    texts.add(call_text.of_list(CONTEXT, items[::-1], Options("sum")))
    assert len(texts) == 4
    assert all(len(text) <= TEXT_BYTES for text in texts)


def test_a_long_list_is_cut_and_keeps_its_number_of_arrays_and_its_options() -> None:
    items = [np.ones(10, "f4")] * 50
    options = [Options("sum", scale=(factor, 1)) for factor in (0.5, 1.5)]
    texts = [call_text.of_list(CONTEXT, items, each) for each in options]
    assert [list_length(text) for text in texts] == [50, 50]
    assert without_digest(texts[0]).endswith("... 50 arrays], op='sum', prescale=0.5)")
    assert all(len(text) <= TEXT_BYTES for text in texts)


def test_factors_that_a_text_has_no_room_for_are_told_apart() -> None:
    items = [np.ones(10, "c16")] * 50
    third = complex(1 / 3, 2 / 3)
    scales = [(third, factor) for factor in (1, third, 2 * third)]
    texts = [call_text.of_list(CONTEXT, items, Options("sum", scale=scale)) for scale in scales]
    assert len(set(texts)) == 3
    assert all(len(text) <= TEXT_BYTES for text in texts)
