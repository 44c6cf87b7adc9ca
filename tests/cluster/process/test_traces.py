"""Tracebacks show all of the user's lines, and this library's where they help."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from allreduce.cluster.process import traces
from allreduce.errors import UsageError
from allreduce.events import logger
from tests.harness import clean_environment, run_commands, script_of

_SOURCE = """
def outer(act):
    inner(act)

def inner(act):
    if isinstance(act, Exception):
        raise act
    act()
"""
_LINE = "  ... 2 lines of allreduce, which ALLREDUCE_LOG_LEVEL=DEBUG shows\n"


def _library() -> Callable[[Any], None]:
    """Return a function that calls or raises what it gets, as one of this library's modules."""
    space: dict[str, Any] = {"__name__": "allreduce.somewhere"}
    exec(compile(_SOURCE, "library.py", "exec"), space)
    outer: Callable[[Any], None] = space["outer"]
    return outer


def _told(act: Any) -> str:
    try:
        _library()(act)
    except Exception as error:
        return traces.text(error)
    raise AssertionError("nothing was raised")


def _my_loss() -> None:
    raise ValueError("wrong")


def _my_step() -> None:
    _library()(_my_loss)


def _my_cleanup() -> None:
    try:
        _my_step()
    except ValueError as error:
        raise RuntimeError("so it ends") from error


def _my_circle() -> None:
    error = ValueError("wrong")
    raise error from error


def test_an_error_of_the_users_is_told_with_the_users_lines_alone() -> None:
    said = _told(_my_step)
    assert said.count(_LINE) == 2
    assert "library.py" not in said
    step, loss = "in _my_step\n    _library()(_my_loss)", "in _my_loss\n    raise"
    assert 0 < said.index(step) < said.index(loss)
    assert said.endswith("ValueError: wrong\n")


def test_causes_are_told_so_too() -> None:
    said = _told(_my_cleanup)
    assert said.count(_LINE) == 2
    assert "in _my_loss" in said
    assert "library.py" not in said
    assert "direct cause" in said


def test_what_the_library_raises_on_purpose_is_in_its_message() -> None:
    said = _told(UsageError("got 3; expected 4"))
    assert said.endswith(f"{_LINE}allreduce.errors.UsageError: got 3; expected 4\n")


def test_an_error_that_the_library_does_not_know_shows_all_of_it() -> None:
    said = _told(KeyError("x"))
    assert "library.py" in said
    assert "in inner" in said
    assert _LINE not in said


def test_all_is_shown_on_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger.name):
        said = _told(_my_step)
    assert "library.py" in said
    assert _LINE not in said


def no_numbers() -> None:
    import numpy as np

    import allreduce as ar

    ar.init()
    ar.config.enable_check_numerics()

    @ar.function
    def step(x: ar.Tensor) -> ar.Tensor:
        return ar.ops.log(x - 2)

    step(np.ones(3))


def no_devices() -> None:
    import allreduce as ar

    ar.init()
    ar.config.set_logical_devices("CPU", 0)


def no_name() -> None:
    import numpy as np

    import allreduce as ar
    from allreduce.cluster.process.exit_hooks import Watch

    @ar.function
    def step(x: ar.Tensor) -> ar.Tensor:
        raise NameError("a rank's")

    Watch(0)
    step(np.ones(3))


def test_programs_that_end_by_an_error_tell_of_it_so() -> None:
    programs = [script_of(each) for each in (no_numbers, no_devices, no_name, no_devices)]
    short = clean_environment()
    environments = [*[short] * 3, {**short, "ALLREDUCE_LOG_LEVEL": "DEBUG"}]
    results = run_commands([[sys.executable, "-c", each] for each in programs], environments, 60)
    ends = ("made float64(3,) 3 NaN", " is an integer from 1", "a rank's", " is an integer from 1")
    for result, said in zip(results, ends, strict=True):
        assert result.returncode == 1
        assert said in result.stderr.splitlines()[-1]
    assert ["lines of allreduce, which" in each.stderr for each in results] == [*[True] * 3, False]
    assert ["integers.py" in each.stderr for each in results] == [*[False] * 3, True]
    assert "in no_numbers" in results[0].stderr
    assert "replicator.py" not in results[0].stderr


def test_what_has_not_come_through_the_library_is_left_to_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "__excepthook__", lambda kind, error, trace: seen.append(error))
    for act in (_my_loss, _my_circle, _my_cleanup):
        try:
            act()
        except Exception as error:
            traces.on_uncaught(type(error), error, error.__traceback__)
    assert [str(each) for each in seen] == ["wrong"] * 2
