"""README.md: short enough for two minutes, and its code runs on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness import run_ranks

PAGE = (Path(__file__).resolve().parents[1] / "README.md").read_text()
# The names that the page's code takes for granted.
DATA = """
import os, tempfile
import numpy as np

os.chdir(tempfile.mkdtemp())
random = np.random.default_rng(0)
x = random.normal(size=(300, 8)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
array = np.ones(3)
"""


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 120


def test_the_code_runs_on_two_ranks() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    reached = "assert comm.size == 2 and total[0] == 2 and 0 < loss < 4\n"
    for result in run_ranks(DATA + code + reached, 2):
        assert result.returncode == 0, result.stderr
