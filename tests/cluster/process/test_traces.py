"""Chains of causes, and texts of errors."""

from __future__ import annotations

import pytest

from allreduce.cluster.process import traces


def _fails() -> None:
    raise ValueError("wrong")


def _cleans_up() -> None:
    try:
        _fails()
    except ValueError as error:
        raise RuntimeError("so it ends") from error


def test_causes_are_told_once_each() -> None:
    circle = ValueError("wrong")
    circle.__cause__ = circle
    assert list(traces.causes(circle)) == [circle]
    with pytest.raises(RuntimeError) as caught:
        _cleans_up()
    assert [str(each) for each in traces.causes(caught.value)] == ["so it ends", "wrong"]
    said = traces.text(caught.value)
    assert "in _fails\n" in said
    assert "direct cause" in said
    assert said.endswith("RuntimeError: so it ends\n")


def test_a_syntax_error_is_summed_up_by_its_message_not_by_its_place() -> None:
    with pytest.raises(SyntaxError) as found:
        compile("x = = 1", "train.py", "exec")
    assert traces.summary(found.value).startswith("SyntaxError: invalid syntax")
