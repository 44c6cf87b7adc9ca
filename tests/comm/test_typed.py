"""The texts that stand for calls of lists and factors."""

from __future__ import annotations

import numpy as np

from allreduce.comm import typed
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
    assert all(len(text) <= typed.TEXT_BYTES for text in texts)
