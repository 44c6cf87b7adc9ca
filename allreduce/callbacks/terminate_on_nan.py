"""`TerminateOnNaN`: stop, with the weights of before, where `fit` else raises."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from allreduce.callbacks.base import Callback, Logs


class TerminateOnNaN(Callback):
    """Stops when the loss is NaN or infinite, and gives back the weights of before.

    Runs on all ranks. To have these weights it copies all variables before each batch, and reads
    the loss after it; if an update has overflowed, they are the last that gave a finite loss. The
    optimizer's slots are not given back: compile the model again before going on.
    """

    handles_nan: ClassVar[bool] = True

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        self._good: list[np.ndarray] | None = None
        self._before: list[np.ndarray] | None = None

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002
        self._before = self.model.get_weights() if self.model.built else None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        loss: Any = (logs or {}).get("loss", 0.0)
        if np.isfinite(loss):
            self._good = self._before
            return
        self.say(f"batch {batch}: the loss is {loss}, terminating; the weights are those of before")
        for weights in (self._before, self._good):  # an update may have overflowed before
            if weights is not None and all(np.isfinite(each).all() for each in weights):
                self.model.set_weights(weights)
                break
        self.model.stop_training = True
