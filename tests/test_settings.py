"""Environment variables: what each accepts, and what is said about wrong or unknown ones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from allreduce import settings
from allreduce.errors import UsageError


def test_an_empty_environment_gives_the_defaults() -> None:
    loaded = settings.load({})
    assert loaded.timeout == 300.0
    assert (loaded.rank, loaded.size, loaded.leader, loaded.secret) == (None,) * 4
    assert loaded.unknown == ()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("RANK", "0", 0),
        ("SIZE", "8", 8),
        ("LEADER", "node7:5000", "node7:5000"),
        ("LEADER", "[::1]:5000", "[::1]:5000"),
        ("SECRET", "shh", b"shh"),
        ("TIMEOUT", "2.5", 2.5),
        ("LOG_LEVEL", "debug", "DEBUG"),
        ("TRANSPORT", "shared", "shared"),
    ],
)
def test_values_are_typed(name: str, text: str, expected: Any) -> None:
    loaded = settings.load({settings.PREFIX + name: text})
    assert getattr(loaded, name.lower()) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", ""),
        ("TRANSPORT", ""),
        ("SIZE", "0"),
        ("SIZE", "2.0"),
        ("LEADER", "node7"),
        ("LEADER", ":5000"),
        ("LEADER", "node7:0"),
        ("LEADER", "node7:65536"),
        ("LEADER", "node7:http"),
        ("TIMEOUT", "0"),
        ("TIMEOUT", "-3"),
        ("TIMEOUT", "inf"),
        ("TIMEOUT", "nan"),
        ("TIMEOUT", "soon"),
        ("LOG_LEVEL", "LOUD"),
    ],
)
def test_a_wrong_value_names_its_variable_and_what_it_expects(name: str, text: str) -> None:
    (row,) = [row for row in settings.TABLE if row.name == name]
    with pytest.raises(UsageError) as caught:
        settings.load({row.variable: text})
    assert f"{row.variable}={text!r} is not valid: expected {row.expects}" in str(caught.value)


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(UsageError, match="ALLREDUCE_SECRET=<hidden> is not valid"):
        settings.load({"ALLREDUCE_SECRET": ""})


def test_an_unknown_name_suggests_the_nearest() -> None:
    environ = {"ALLREDUCE_TIMEOOT": "3", "ALLREDUCE_": "x", "OTHER": "y"}
    loaded = settings.load(environ)
    assert "unknown environment variable ALLREDUCE_TIMEOOT; did you mean 'ALLREDUCE_TIMEOUT'?" in (
        loaded.unknown
    )
    assert len(loaded.unknown) == 2


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TIMEOUT", "7")
    assert settings.load().timeout == 7.0


def test_every_row_of_the_table_has_its_field() -> None:
    names = {row.name.lower() for row in settings.TABLE}
    assert names == {field.name for field in fields(settings.Settings)} - {"unknown"}
    assert len(names) == len(settings.TABLE)
