"""When a program that sets no seed logs the drawn one."""

from __future__ import annotations

import pytest

from allreduce.events import logger
from allreduce.graph.core import seed


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in (("_seed", None), ("_drawn", False), ("_untold", False), ("_times_set", 0)):
        monkeypatch.setattr(seed, name, value)
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger.name)


def test_a_seed_that_was_drawn_is_told_once_when_something_comes_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drawn = seed.chosen()
    seed.adopt(drawn)  # as ranks that make a strategy do
    assert not caplog.records
    assert seed.get_seed() == seed.get_seed() == seed.chosen() == drawn
    (record,) = caplog.records
    assert f"ar.set_seed({drawn}) repeats this run" in record.getMessage()


def test_nothing_is_said_of_a_seed_that_another_takes_the_place_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seed.adopt(seed.chosen())
    seed.set_seed(7)
    assert seed.get_seed() == 7
    assert not caplog.records
