"""Jobs that start in a folder of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.failures.jobs import SCRIPT, Job, start

Break = Callable[..., AbstractContextManager[Job]]


@pytest.fixture
def broken(tmp_path: Path) -> Break:
    """Start a job that goes wrong: launcher, moment, action, victim, size, variables."""

    def begin(
        launcher: str,
        moment: str,
        action: str = "nothing",
        victim: int = 1,
        size: int = 2,
        **env: str,
    ) -> AbstractContextManager[Job]:
        folder = tmp_path / "tmp"
        folder.mkdir()
        arguments = (moment, action, str(victim))
        return start(launcher, size, SCRIPT, *arguments, folder=folder, env=env)

    return begin
