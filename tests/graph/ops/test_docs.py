"""docs/operators.md is complete."""

from __future__ import annotations

import re
from pathlib import Path

from allreduce.graph.core.op_table import lookup, names
from allreduce.graph.ops import functions

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "operators.md"


def test_every_operator_and_function_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", PAGE.read_text()))
    computed = {name for name in names() if lookup(name).kind == "compute"}
    public = set(functions.__all__) - {"logits_of"}  # a question, not an operator
    assert (computed | public) - words == set()


def test_the_files_on_the_page_exist() -> None:
    files = re.findall(r"\| (\w+\.py) \|$", PAGE.read_text(), re.MULTILINE)
    known = {path.name for path in (ROOT / "allreduce" / "graph" / "ops").rglob("*.py")}
    assert len(files) > 15
    assert set(files) - known == set()
