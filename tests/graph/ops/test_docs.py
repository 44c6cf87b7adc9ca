"""docs/operators.md is complete."""

from __future__ import annotations

import re
from pathlib import Path

from allreduce.graph.core.op_table import lookup, names
from allreduce.graph.ops import functions

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "operators.md"


def _called(text: str) -> set[str]:
    """Give the names with which the pieces of code in a text begin."""
    pieces = re.findall(r"`([^`\n]*)`", text)
    return {found[1] for piece in pieces if (found := re.match(r"(?:ar\.)?(\w+)", piece))}


def test_every_public_function_has_a_row_in_the_table() -> None:
    first_cells = re.findall(r"^\| ((?:[^|\\]|\\.)*) \|", PAGE.read_text(), re.MULTILINE)
    public = set(functions.__all__) - {"logits_of"}  # a question, not an operator
    assert public - _called("\n".join(first_cells)) == set()


def test_every_operator_of_programs_is_on_the_page() -> None:
    computed = {name for name in names() if lookup(name).kind == "compute"}
    assert computed - _called(PAGE.read_text()) == set()


def test_the_files_on_the_page_exist() -> None:
    files = re.findall(r"\| (\w+\.py) \|$", PAGE.read_text(), re.MULTILINE)
    known = {path.name for path in (ROOT / "allreduce" / "graph" / "ops").rglob("*.py")}
    assert len(files) > 15
    assert set(files) - known == set()
