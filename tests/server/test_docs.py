"""The program of docs/cluster-graph.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.server.clusters import serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster-graph.md"


def test_the_program_of_the_page_runs() -> None:
    program, placing = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with serving(worker=2, ps=1) as servers:
        names: dict[str, Any] = {"target": servers[0].target}
        exec(compile(program, str(PAGE), "exec"), names)
        exec(compile(placing, str(PAGE), "exec"), names)
    assert float(names["value"]) == 48.0
