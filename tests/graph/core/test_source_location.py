"""Which line a message calls the user's."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from allreduce.graph.core.source_location import users_line


@pytest.mark.parametrize("name", ["allreduce.strategies.elsewhere", "numpy.elsewhere"])
def test_the_librarys_own_modules_are_skipped_wherever_their_files_are(name: str) -> None:
    module = ModuleType(name)
    exec(compile("def ask(find): return find()", "/elsewhere.py", "exec"), vars(module))
    here = f"{__file__}:{sys._getframe().f_lineno + 1}"
    assert module.ask(users_line) == here


def test_a_module_whose_name_only_begins_like_the_librarys_is_the_users() -> None:
    module = ModuleType("allreduce_job")
    exec(compile("def ask(find): return find()", "/job.py", "exec"), vars(module))
    assert module.ask(users_line) == "/job.py:1"
