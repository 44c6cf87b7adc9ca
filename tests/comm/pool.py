"""Groups of ranks that live through many tests: one per kind and size."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.comm import (
    cases,
    crossings,
    drawn,
    exchanges,
    group_cases,
    message_cases,
    operator_cases,
)
from tests.harness import ROOT, clean_environment, explicit_ranks, run_threads

Runner = Callable[..., list[Any]]  # (case, *arguments) -> what each rank returned


def case(name: str) -> Callable[..., Any]:
    """Look a case up."""
    places = (cases, operator_cases, exchanges, crossings, drawn, message_cases, group_cases)
    found: Callable[..., Any] = next(getattr(p, name) for p in places if hasattr(p, name))
    return found


class ProcessPool:
    """`size` processes of one job that run one case after the other.

    Args:
        size: How many.
        transport: What carries their collectives; None has them choose.
        ranks: Each rank's variables, and the words before its command; on this host without it.
    """

    def __init__(
        self,
        size: int,
        transport: str | None = "shared",
        ranks: Sequence[tuple[Mapping[str, str], Sequence[str]]] | None = None,
    ) -> None:
        chosen = {} if transport is None else {"ALLREDUCE_TRANSPORT": transport}
        self._ranks = [
            subprocess.Popen(
                [*before, sys.executable, "-m", "tests.comm.worker"],
                cwd=ROOT,
                env={**clean_environment(), **chosen, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for own, before in ranks or [(own, ()) for own in explicit_ranks(size)]
        ]

    def run(self, name: str, *arguments: Any, timeout: float = 60) -> list[Any]:
        """Run a case on all ranks and return their results; a rank's error fails the test."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([name, *arguments]) + "\n")
        deadline = time.monotonic() + timeout
        answers = [self._answer(index, deadline) for index in range(len(self._ranks))]
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert not errors, "\n".join(errors)
        return [answer["result"] for answer in answers]

    def _answer(self, index: int, deadline: float) -> dict[str, Any]:
        stream = self._ranks[index].stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"rank {index} did not answer"
        line = stream.readline()
        assert line, f"rank {index} ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> list[int]:
        """End the ranks and return their exit codes."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        codes = []
        for rank in self._ranks:
            try:
                codes.append(rank.wait(10))
            except subprocess.TimeoutExpired:
                rank.kill()
                codes.append(rank.wait())
            assert rank.stdout is not None
            rank.stdout.close()
        return codes


def in_threads(size: int) -> Runner:
    """Return a runner whose ranks are threads of this process."""

    def run(name: str, *arguments: Any) -> list[Any]:
        function = case(name)
        return run_threads(lambda comm: function(comm, *arguments), size, timeout=60)

    return run
