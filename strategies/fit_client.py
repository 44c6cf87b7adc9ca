"""A worker's calls of `fit`, as the first parameter server deals them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from allreduce.strategies.server_options import Worker

from allreduce.cluster.host.waiting import Wait
from allreduce.errors import TimeoutError
from allreduce.parameters.dealing import TRAIN, Answer
from allreduce.parameters.row_ranges import FitSpec
from allreduce.server.client.parameter_client import ParameterServer
from allreduce.training.dealt_fit import Report

MOST_FITS = 1 << 20  # of one strategy


class FitClient:
    """Asks the first server for the rows of one call of `fit` after the other.

    Args:
        server: The first server.
        worker: This worker.
        workers: The number of workers in the cluster.
        is_sync: Whether updates are synchronous.
        strategy: The number of the strategy in this program.

    Attributes:
        share: The share of a synchronous update that is to be computed; None for none.
        taken: Whether the gradients of the latest part were used.
    """

    def __init__(
        self,
        server: ParameterServer,
        worker: Worker,
        *,
        workers: int,
        is_sync: bool,
        strategy: int,
    ) -> None:
        self._server, self._worker = server, worker
        self._workers, self._is_sync = workers, is_sync
        self._number = strategy * MOST_FITS
        self._spec: FitSpec | None = None
        self._known: list[tuple[dict[str, Any], Sequence[np.ndarray]]] = []  # sums of epochs
        self.share: dict[str, Any] | None = None
        self.taken = True

    def begin(self, spec: FitSpec) -> None:
        """Begin the next call; blocks until the chief has."""
        self._number, self._spec, self._known = self._number + 1, spec, []
        self._begin()

    def _begin(self, *, again: bool = False) -> None:
        """Begin a call, or again after a restart of the server."""
        assert self._spec is not None
        arrays = [each for _, found in self._known for each in found]
        fields = {"again": again, "known": [each for each, _ in self._known]}
        fields |= {
            "fit": self._number,
            "spec": self._spec.as_json(),
            "is_chief": self._worker.is_chief,
        }
        fields |= {"workers": self._workers, "task": self._worker.task}
        wait = Wait(self._worker.timeout)
        while self._server.call("begin", fields, arrays)[0].get("wait"):
            if not wait.has_time_left("the chief to call fit"):
                raise TimeoutError(
                    f"[parameter server] {self._worker.task}: the chief has not called fit (number "
                    f"{self._number % MOST_FITS}) within {self._worker.timeout:g} s; run the same "
                    "program on all workers"
                )

    def ask(self, seen: int, stops: bool, done: Report | None) -> Answer:
        """Report a part, and ask what to do next; see `training.dealt_fit.Dealer`."""
        fields: dict[str, Any] = {"fit": self._number, "seen": seen, "stops": stops}
        fields["is_chief"] = self._worker.is_chief
        arrays: Sequence[np.ndarray] = ()
        if done is not None:
            fields["done"], arrays = done
        wait = Wait(self._worker.timeout)
        while True:
            reply, found = self._server.call("next", fields, arrays)
            fields.pop("done", None)
            arrays = ()
            if reply.get("unknown"):
                self._begin(again=True)
            elif reply["what"] != "wait":
                break
            elif not wait.has_time_left("the parts of other workers"):
                raise late(self._server, self._worker)
        answer = Answer(reply.pop("what"), reply, list(found))
        self.taken = True
        self.share = answer.fields if answer.what == TRAIN and self._is_sync else None
        if answer.what == "epoch":
            self._known.append((answer.fields, answer.arrays))
        return answer

    def claim(self) -> bool:
        """Return whether the synchronous update takes the share's gradients."""
        assert self.share is not None
        if self.share["asks"]:
            fields = {name: self.share[name] for name in ("part", "update")}
            reply, _ = self._server.call("claim", {**fields, "fit": self._number})
            self.taken = bool(reply.get("taken", False))
        return self.taken

    def end(self) -> None:
        """Compute no more shares."""
        self.share = None


def late(server: ParameterServer, worker: Worker) -> TimeoutError:
    """Return the error of a worker that has waited for others for too long."""
    status, _ = server.call("status", {})
    living = ", ".join(status["workers"])
    return TimeoutError(
        f"[parameter server] {worker.task}: nothing to do within {worker.timeout:g} s; the workers "
        f"that live are {living}: start the missing ones (--restarts does)"
    )
