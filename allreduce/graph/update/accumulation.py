"""Gradient accumulation: several steps, each with a micro-batch, make one update.

Each step adds its sums of gradients and its number of samples to the arena's. Only the last step of
an update reduces them and changes parameters. The mean is exact for micro-batches of any sizes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from allreduce.events import counted, current_rank, logger
from allreduce.graph.trace.trace import current_trace
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.update import UpdateRule
from allreduce.reduction import Arena


class Accumulation:
    """Counts the micro-batches whose gradients an arena holds; equally on all replicas.

    Args:
        rule: The optimizer.
        variables: The arena's variables.
        arenas: The arena on each local replica.

    Attributes:
        waiting: The number of micro-batches since the latest update.
        totals: The number of steps without an update, and with one; None if all have one.
    """

    def __init__(
        self, rule: UpdateRule, variables: Sequence[Variable], arenas: Sequence[Arena]
    ) -> None:
        self._rule, self._variables, self._arenas = rule, tuple(variables), arenas
        self.waiting = 0
        self.totals: list[int] | None = None

    def begin(self, size: int) -> None:
        """Decide whether the step that begins completes an update.

        Args:
            size: The number of micro-batches in an update; 0 to complete it in any case.
        """
        if self.totals is None and size > 1:
            self.totals = [0, 0]
            weakref.finalize(self, _warn_of_none, type(self._rule).__name__, size, self.totals)
        for arena in self._arenas:
            arena.begins, arena.completes = self.waiting == 0, self.waiting + 1 >= size

    def end(self) -> None:
        """Count a step that has succeeded."""
        completes = self._arenas[0].completes
        self.waiting = 0 if completes else self.waiting + 1
        if completes:
            self.discard()
        if self.totals is not None:
            self.totals[completes] += 1

    def discard(self) -> None:
        """Forget the micro-batches since the latest update, as after an error in one of them."""
        self.waiting = 0
        for arena in self._arenas:
            arena.digests = b""

    def finish(self) -> None:
        """Record the update alone, as a step."""
        trace = current_trace()
        assert trace is not None, "a step"
        attrs = {"rule": self._rule, "variables": self._variables}
        trace.effect("apply_gradients", [], attrs, self._variables, self._variables[0].place)


def _warn_of_none(optimizer: str, size: int, totals: Sequence[int]) -> None:
    """Warn of an optimizer that ends without a single update."""
    steps, updates = totals
    if steps and not updates and not current_rank():
        logger.warning(
            "%s(gradient_accumulation=%d) has changed nothing: after %s, none was the %dth, which "
            "updates. Give it a smaller number, or call optimizer.finish_update() on every rank "
            "after the last micro-batch",
            *(optimizer, size, counted(steps, "micro-batch").replace("batchs", "batches"), size),
        )
