"""Call callbacks on all ranks, and exchange what they decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from allreduce.callbacks import Callback
from allreduce.callbacks.base import ALIASES, HOOKS, Logs
from allreduce.errors import AllreduceError, UsageError, did_you_mean
from allreduce.graph.replicate.replicator import Replicator
from allreduce.training.ranks import gather_integers, raise_together, size_of


def as_callbacks(given: Any) -> list[Callback]:
    """Return a list of callbacks."""
    if given is None:
        return []
    found = list(given) if isinstance(given, Iterable) else [given]
    for each in found:
        if not isinstance(each, Callback):
            hint = f"; make one: {each.__name__}(…)" if isinstance(each, type) else ""
            raise UsageError(
                f"callbacks takes ar.callbacks.Callback objects, not {each!r:.80}{hint}"
            )
        for name in dir(each):
            if name.startswith("on_") and name not in HOOKS and callable(getattr(each, name)):
                raise UsageError(
                    f"{type(each).__name__}.{name} is never called: callbacks have no such "
                    f"method{did_you_mean(name, HOOKS)}"
                )
    return found


class Hooks:
    """The callbacks of one call of `fit`, `evaluate` or `predict`.

    Args:
        callbacks: What to call, in this order.
        params: What `Callback.params` says.
    """

    def __init__(
        self, model: Any, callbacks: Iterable[Callback], params: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._replicator: Replicator = model.replicator
        self._alone = size_of(self._replicator) == 1
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            callback.set_model(model)
            callback.set_params(dict(params))

    @property
    def handle_nan(self) -> bool:
        """Whether a callback deals with a NaN loss, so that the loop does not raise."""
        return any(callback.handles_nan for callback in self._callbacks)

    @property
    def stopping(self) -> bool:
        """Whether some rank's callback has asked to stop; equal on all ranks."""
        return bool(self._model.stop_training)

    def call(
        self, name: str, *arguments: Any, logs: Logs | Callable[[], Logs] | None = None
    ) -> None:
        """Call one method of all callbacks that override it.

        Args:
            name: "on_epoch_end".
            arguments: What it gets before the logs.
            logs: The logs, or what computes them if a callback wants them; a collective call.

        Raises:
            MismatchError: It raised on another rank; the message has that rank's traceback.
        """
        wanting = [each for each in self._callbacks if _overrides(each, name)]
        if not wanting:
            return
        values = logs() if callable(logs) else logs
        for callback in wanting:
            self._call(callback, name, (*arguments, {} if values is None else values))

    def _call(self, callback: Callback, name: str, arguments: tuple[Any, ...]) -> None:
        error: Exception | None = None
        try:
            getattr(callback, name)(*arguments)
        except Exception as raised:
            # What all ranks raise is raised here on all; they exchange nothing more.
            if self._alone or (isinstance(raised, AllreduceError) and raised.everywhere):
                raise
            error = raised
        if not self._alone:
            self._agree(f"{type(callback).__name__}.{name}", error)

    def _agree(self, where: str, error: Exception | None) -> None:
        """Exchange whether a callback raised or stops, and take over rank 0's learning rate."""
        rate = self._rate()
        bits = int(np.float64(rate).view(np.int64))
        mine = [error is not None, bool(self._model.stop_training), bits]
        try:
            found = gather_integers(self._replicator, f"the outcome of {where}", mine)
        except AllreduceError as failure:
            if error is None:
                raise
            error.add_note(f"the other ranks could not be told: {failure}")
            found = None
        if found is None:  # not in the except block: there, Python replaces the error's context
            assert error is not None, "it has a note"
            raise error
        if found[:, 0].any():
            raise_together(self._replicator, where, error)
        self._model.stop_training = bool(found[:, 1].any())
        first = float(found[0, 2:].view(np.float64)[0])
        if not math.isnan(first) and first != rate:
            self._model.optimizer.learning_rate = first

    def _rate(self) -> float:
        """Return the learning rate; NaN for a schedule, which steps compare."""
        compiled = getattr(self._model, "is_compiled", False)
        rate = self._model.optimizer.constant_rate if compiled else None
        return math.nan if rate is None else rate


def _overrides(callback: Callback, name: str) -> bool:
    if name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name):
        return True
    return name in ALIASES and _overrides(callback, ALIASES[name])
