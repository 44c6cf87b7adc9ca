"""One server's part of an arena: parameters, slots, and the updates of both.

Asynchronous updates follow Dean et al., Large scale distributed deep networks (NIPS 2012), section
4.1. Synchronous ones take the first gradients of each update, and drop later ones: Chen et al.,
Revisiting distributed synchronous SGD (2016), section 3.1.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from allreduce.devices.clipping import sum_of_squares
from allreduce.errors import ShapeError, UnsupportedError
from allreduce.optim.base import Optimizer
from allreduce.parameters.partition import Part

_ALIGNMENT = 64  # bytes
_MOST_STALENESS = 100  # larger numbers are counted together


class ArenaStore:
    """A part of an arena and its optimizer; safe to use from several threads.

    Args:
        part: The part.
        optimizer: The optimizer, which belongs to the store from here on; None if there are no
            updates before `configure` gives one.
        dtype: The arena's dtype.
        servers: The number of servers that hold parts of the arena.

    Attributes:
        version: The number of updates so far.
        has_values: Whether parameters have been set or loaded.
        source: Where their first values came from, for messages.
        restored: Whether that was a checkpoint.
        every: After how many updates a checkpoint is due; 0 for never.
        begun: The version of the latest checkpoint that was begun, written or not; 0 for none.
        saved: The version of the latest one that is in a file; 0 for none.
        staleness: How many gradients were so many updates old when they were applied.
    """

    def __init__(
        self, part: Part, optimizer: Optimizer | None, dtype: Any, servers: int = 1
    ) -> None:
        self.part, self.dtype = part, np.dtype(dtype)
        self.parameters = _zeros(part.size, self.dtype)
        self.slots: dict[str, np.ndarray] = {}
        self._optimizer: Optimizer | None = None
        self.version = 0
        self.has_values = False
        self.source, self.restored = "", False
        self.every = 0
        self.begun = self.saved = 0
        self.staleness: Counter[int] = Counter()
        self._servers = servers
        self._sums: np.ndarray | None = None  # of the synchronous update that is under way
        self._count = 0.0
        self._shares: set[int] = set()  # of that update, which have come
        self._current = -1  # that update
        self._applied = -1  # the latest one that is over
        self._latest: dict[str, int] = {}  # each worker's latest gradient
        self._changed = threading.Condition(threading.RLock())
        if optimizer is not None:
            self.configure(optimizer)

    @property
    def is_configured(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        assert self._optimizer is not None, "gradients come after it"
        return self._optimizer

    def configure(self, optimizer: Optimizer) -> None:
        """Go on with another optimizer; slots that it adds begin with zeros."""
        spans = [(path, slice(low, high)) for path, low, high in self.part.spans]
        with self._changed:
            self.add_slots(optimizer.all_slots)
            self._optimizer, self._update = optimizer, optimizer.bucket_update(spans)

    def add_slots(self, names: Iterable[str]) -> None:
        """Add slots of zeros, if they are missing."""
        for name in names:
            if name not in self.slots:
                self.slots[name] = _zeros(self.part.size, self.dtype)

    def set(
        self, parameters: np.ndarray, slots: Mapping[str, np.ndarray], version: int | None = None
    ) -> None:
        """Set the values; slots that are not given keep theirs.

        Args:
            parameters: `(n,)`.
            slots: `(n,)` each, by name.
            version: The number of updates that made them; None to keep the number.

        Raises:
            ShapeError: An array has another size than the part.
        """
        for name, array in (("parameters", parameters), *slots.items()):
            self._check(name, array)
        with self._changed:
            self.parameters[...] = parameters
            for name, array in slots.items():
                self.slots[name][...] = array
            self.version = self.version if version is None else version
            self.has_values = True
            self._changed.notify_all()

    def assign(self, parameters: np.ndarray) -> None:
        """Set the parameters `(n,)`, as an update of its own."""
        with self._changed:
            self.set(parameters, {}, self.version + 1)

    def push(
        self, gradients: np.ndarray, count: float, seen: int, worker: str = "", number: int = 0
    ) -> int:
        """Update with one worker's gradients at once.

        Args:
            gradients: Their sum over the worker's samples, `(n,)`; may be changed.
            count: What to divide it by: the number of samples, or more where it is clipped.
            seen: The version of the parameters that the worker computed them with; -1 if they were
                those of a server that has restarted.
            worker: The worker's name.
            number: The number of the gradient, counted by the worker from 1; 0 for none. A number
                that has come before is ignored, since a worker repeats a call whose answer it has
                not got.

        Returns:
            The gradient's staleness: the number of updates since the worker has read; -1 if it is a
            repetition.
        """
        self._check("gradients", gradients)
        with self._changed:
            stale = self._admit(seen, worker, number)
            if stale >= 0:
                self._apply(gradients, count)
        return stale

    def _admit(self, seen: int, worker: str, number: int) -> int:
        """Return a gradient's staleness, which is counted; -1 if it is a repetition."""
        if number and self._latest.get(worker, 0) >= number:
            return -1
        self._latest[worker] = number
        stale = max(self.version - seen, 0) if seen >= 0 else 0
        self.staleness[min(stale, _MOST_STALENESS)] += 1
        return stale

    def contribute(
        self, gradients: np.ndarray, count: float, update: int, share: int, of: int
    ) -> None:
        """Add one share of a synchronous update; the last one updates.

        Args:
            gradients: Their sum over the share's samples, `(n,)`.
            count: The number of samples.
            update: The number of the update, which rises.
            share: The number of the share. One that has come already is ignored, and so is one of
                an update that is over.
            of: The number of shares in the update.
        """
        self._check("gradients", gradients)
        with self._changed:
            if not self._admit_share(update, share):
                return
            if self._sums is None:
                self._sums = _zeros(self.part.size, self.dtype)
            if self._shares:
                self._sums += gradients
                self._count += count
            else:
                self._sums[...] = gradients
                self._count = count
            self._shares.add(share)
            if len(self._shares) == of:
                self._shares.clear()
                self._applied = update
                self._apply(self._sums, self._clipped(self._sums, self._count))

    def _admit_share(self, update: int, share: int) -> bool:
        """Return whether a share is new, and of the newest update, which is not over."""
        if update <= self._applied or update < self._current:
            return False
        if update > self._current:  # what is there of another one has lost its other shares
            self._shares.clear()
            self._current = update
        return share not in self._shares

    def _clipped(self, sums: np.ndarray, count: float) -> float:
        """Return what to divide sums by, so that the norm of the mean is at most `clip_norm`."""
        limit = self.optimizer.clip_norm
        if limit is None:
            return count
        if self._servers > 1:
            raise UnsupportedError(
                "synchronous updates clip by the norm of all gradients, of which each of "
                f"{self._servers} servers has only a part: use one server, or clip_value"
            )
        norm = math.sqrt(sum_of_squares([sums]))
        return norm / limit if norm > limit * count > 0 else count

    def _apply(self, gradients: np.ndarray, count: float) -> None:
        divisor = np.asarray([count], self.dtype)
        step = self.version + 1
        self.optimizer.check(step)
        if self.part.size:
            self._update(self.parameters, gradients, self.slots, divisor, step)
        self._finish(step)

    def _finish(self, step: int) -> None:
        self.version = step
        self._changed.notify_all()

    def initialised(self, timeout: float) -> bool:
        """Wait until values have been set; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_values, timeout)

    @property
    def is_due(self) -> bool:
        """Whether so many updates have been done since the latest checkpoint was begun."""
        return self.every > 0 and self.version - self.begun >= self.every

    def snapshot(self) -> tuple[dict[str, np.ndarray], int]:
        """Copy the parameters (as "parameters") and slots, and the version they belong to."""
        with self._changed:
            found = {"parameters": self.parameters, **self.slots}
            return {name: array.copy() for name, array in found.items()}, self.version

    def _check(self, name: str, array: np.ndarray) -> None:
        if array.shape != (self.part.size,):
            raise ShapeError(
                f"[parameter server] {name} of shape {array.shape} were sent for a part of "
                f"{self.part.size} elements; run the same program on all workers"
            )


def _zeros(size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return zeros that begin at a cache line."""
    room = np.zeros(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size * dtype.itemsize].view(dtype)
