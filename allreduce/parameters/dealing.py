"""Deal out the rows of one call of `fit` among the workers that live.

The rows of an epoch are cut into parts. A worker asks for one, works on it, and reports its sums
with the next question. The parts of a worker that dies go to others. When all parts of an epoch are
done, every worker learns the sums, from which it computes the same History.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from allreduce.parameters.aggregation import Aggregation
from allreduce.parameters.row_ranges import FitSpec, RowRange, cut_training, cut_validation

TRAIN, VALIDATE = "train", "validate"


@dataclass(slots=True)
class _Sums:
    """Sums over samples, as workers' reports add them up."""

    names: list[Any] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)

    def add(self, names: list[Any], arrays: Sequence[np.ndarray]) -> None:
        if not self.arrays:
            self.names, self.arrays = names, [np.array(each, np.float64) for each in arrays]
            return
        for total, each in zip(self.arrays, arrays, strict=True):
            total += each


@dataclass(slots=True)
class Answer:
    """What a worker does next.

    Attributes:
        what: "train" or "validate" a part, "epoch" to learn an epoch's sums, "wait", or "end".
        fields: The part, or the number of the epoch, as plain data.
        arrays: The sums of an epoch.
    """

    what: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: list[np.ndarray] = field(default_factory=list)


class Fit:
    """One call of `fit` of all workers; safe to use from several threads.

    Args:
        spec: What to do.
        workers: The number of workers in the cluster.
        aggregation: What synchronous updates take; None if updates are asynchronous.

    Attributes:
        epoch: The epoch under way.
        is_restored: Whether it was read from a file.
    """

    def __init__(self, spec: FitSpec, workers: int, aggregation: Aggregation | None = None) -> None:
        self.spec, self._workers, self._aggregation = spec, workers, aggregation
        self.epoch = spec.first
        self.is_restored = False
        self._phase = TRAIN
        self._results: list[dict[str, _Sums]] = []  # of the epochs that are over
        self._sums: dict[str, _Sums] = {}
        self._stopping = False
        self._has_chief = True  # whether the chief lives
        self._gone: set[str] = set()  # workers, each of which may still be waiting for an answer
        self._answered = spec.first  # epochs after which the chief has said whether to go on
        self._changed = threading.Condition()
        self._begin(TRAIN)

    # --- parts ---

    def _begin(self, phase: str) -> None:
        self._phase = phase
        self._sums[phase] = _Sums()
        self._parts: list[RowRange] = []
        if self.epoch < self.spec.epochs:
            shares = 0 if self._aggregation is None else self._aggregation.size
            self._parts = (
                cut_validation(self.spec)
                if phase == VALIDATE
                else cut_training(self.spec, self.epoch, self._workers, shares)
            )
        self._queue = deque(range(len(self._parts)))
        self._dealt: dict[int, set[str]] = {}  # the workers that compute each part
        self._left = len(self._parts)

    # --- questions ---

    def next(
        self, worker: str, seen: int, *, is_chief: bool, stops: bool, timeout: float
    ) -> Answer:
        """Return what a worker does next; waits up to `timeout` seconds for something.

        Args:
            worker: Its name.
            seen: The first epoch whose sums it has not been told.
            is_chief: Whether it is the chief, whose callbacks decide.
            stops: Whether its callbacks have asked to stop the training.
            timeout: In seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            if is_chief:
                self._has_chief, self._answered = True, max(self._answered, seen)
                self._stopping |= stops
                self._changed.notify_all()
            while True:
                found = self._answer(worker, seen)
                left = deadline - time.monotonic()
                if found is not None or left <= 0:
                    return found or Answer("wait")
                self._changed.wait(left)

    def _answer(self, worker: str, seen: int) -> Answer | None:
        while not self._left and self.epoch < self.spec.epochs:
            self._advance()
        if seen < self.epoch:
            return self._told(seen)
        if self.spec.may_stop and self._has_chief and self._answered < self.epoch:
            return None
        if self._stopping or self.epoch >= self.spec.epochs:
            return Answer("end")
        return self._deal(worker)

    def _advance(self) -> None:
        """Go on to the validation, or to the next epoch."""
        if self._phase == TRAIN and self.epoch in self.spec.validated:
            self._begin(VALIDATE)
            return
        self._results.append(self._sums)
        self._sums = {}
        self.epoch += 1
        self._begin(TRAIN)

    def _told(self, epoch: int) -> Answer:
        arrays: list[np.ndarray] = []
        fields: dict[str, Any] = {"epoch": epoch}
        for phase, sums in self._results[epoch - self.spec.first].items():
            fields[phase] = sums.names
            arrays += sums.arrays
        return Answer("epoch", fields, arrays)

    def _deal(self, worker: str) -> Answer | None:
        if worker in self._gone:
            return None
        syncs = self._aggregation if self._phase == TRAIN else None
        if syncs is not None:
            syncs.begin(self._left if syncs.has_backups else self._left_of_batch())
        number = self._choose(worker, syncs)
        if number is None:
            return None
        self._dealt.setdefault(number, set()).add(worker)
        turn, low, high = self._parts[number]
        fields = {"epoch": self.epoch, "part": number, "turn": turn, "start": low, "stop": high}
        if syncs is not None:
            fields |= {"update": syncs.update, "of": syncs.needed}
            fields["asks"] = syncs.has_backups
            if not syncs.has_backups:  # it will certainly be taken
                syncs.claim(worker, number, syncs.update)
        return Answer(self._phase, fields)

    def _left_of_batch(self) -> int:
        """Return how many shares the next global batch has left; an update takes one batch's."""
        if not self._queue:
            return self._left

        def batch(part: int) -> tuple[int, int]:
            turn, low, _ = self._parts[part]
            return turn, low // self.spec.batch_size

        first = batch(self._queue[0])
        return sum(1 for _ in takewhile(lambda part: batch(part) == first, self._queue))

    def _choose(self, worker: str, syncs: Aggregation | None) -> int | None:
        """Return the part that a worker gets; None if it has to wait."""
        if self._queue:
            may = syncs is None or syncs.is_accepted(self._queue[0]) or self._has_room(syncs)
            return self._queue.popleft() if may else None
        if syncs is None or not syncs.has_backups or not self._has_room(syncs):
            return None
        # A backup computes one of the last parts again, so that their workers hold nobody up.
        again = [
            part
            for part, owners in self._dealt.items()
            if worker not in owners and not syncs.is_promised(part)
        ]
        return min(again, key=lambda part: len(self._dealt[part]), default=None)

    def _has_room(self, syncs: Aggregation) -> bool:
        """Return whether another gradient may be computed for the update under way."""
        busy = sum(len(owners) for p, owners in self._dealt.items() if not syncs.is_accepted(p))
        return syncs.accepted + busy < (syncs.total if syncs.has_backups else syncs.needed)

    # --- reports ---

    def claim(self, worker: str, part: int, update: int) -> bool:
        """Ask whether a share's gradient is taken; if not, the share is dealt out again."""
        with self._changed:
            assert self._aggregation is not None
            if worker not in self._dealt.get(part, ()):
                self._aggregation.drop()
                return False
            if self._aggregation.claim(worker, part, update):
                return True
            self._return(part, worker)
            return False

    def finish(
        self, worker: str, part: int, epoch: int, names: list[Any], arrays: Sequence[np.ndarray]
    ) -> bool:
        """Add a worker's sums over a part; returns False if the part was dealt to another one."""
        with self._changed:
            if epoch != self.epoch or worker not in self._dealt.get(part, ()):
                return False
            del self._dealt[part]
            self._left -= 1
            self._sums[self._phase].add(names, arrays)
            if self._aggregation is not None and self._phase == TRAIN:
                self._aggregation.finish(part)
            self._changed.notify_all()
            return True

    def lose(self, worker: str, *, is_chief: bool) -> int:
        """Deal a dead worker's parts to others; returns how many there are.

        Names are of connections: one that has ended never comes again.
        """
        with self._changed:
            self._gone.add(worker)
            parts = [part for part, owners in self._dealt.items() if worker in owners]
            if self._aggregation is not None and self._phase == TRAIN:
                self._aggregation.lose(worker)
            for part in parts:
                self._return(part, worker)
            self._has_chief &= not is_chief  # nobody waits for the word of a dead one
            self._changed.notify_all()
            return len(parts)

    def _return(self, part: int, worker: str) -> None:
        """Take a part from a worker; unless others compute it, too, it is dealt out again."""
        self._dealt[part].discard(worker)
        if not self._dealt[part]:
            del self._dealt[part]
            self._queue.appendleft(part)
        self._changed.notify_all()

    # --- restarts ---

    @property
    def is_over(self) -> bool:
        """Whether no more rows are dealt out."""
        with self._changed:
            return self._stopping or self.epoch >= self.spec.epochs

    def learn(self, known: Sequence[tuple[dict[str, Any], Sequence[np.ndarray]]]) -> None:
        """Take over the sums of epochs that a worker knows, as after a restart of this server.

        Args:
            known: The fields and arrays of the answers "epoch", from the first one on.
        """
        with self._changed:
            if self.spec.first + len(known) <= self.epoch:
                return
            self._results = []
            for fields, arrays in known:
                rest, found = iter(arrays), {}
                for phase in (TRAIN, VALIDATE):
                    if phase in fields:
                        names = fields[phase]
                        found[phase] = _Sums(names, [next(rest) for _ in range(len(names) + 1)])
                self._results.append(found)
            self.epoch = self.spec.first + len(known)
            self._answered = max(self._answered, self.epoch)
            self._sums = {}
            self._begin(TRAIN)
            if self._aggregation is not None:  # shares of the epoch before will not be reported
                self._aggregation.cancel()
            self._changed.notify_all()

    def state(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Describe what is done as plain data and arrays; parts under way count as not done."""
        with self._changed:
            sums = [*self._results, self._sums]
            fields = {
                "spec": self.spec.as_json(),
                "workers": self._workers,
                "epoch": self.epoch,
                "phase": self._phase,
                "stopping": self._stopping,
                "undone": sorted({*self._queue, *self._dealt}),
                "names": [{phase: each.names for phase, each in found.items()} for found in sums],
                "sizes": [
                    {phase: len(each.arrays) for phase, each in found.items()} for found in sums
                ],
            }
            arrays = [a.copy() for found in sums for each in found.values() for a in each.arrays]
            return fields, arrays

    @classmethod
    def restored(
        cls,
        fields: dict[str, Any],
        arrays: Sequence[np.ndarray],
        aggregation: Aggregation | None = None,
    ) -> Fit:
        """Make the call that `state` described."""
        made = cls(FitSpec.of_json(fields["spec"]), fields["workers"], aggregation)
        made.epoch = made._answered = fields["epoch"]
        made._begin(fields["phase"])
        made._stopping = fields["stopping"]
        rest, found = iter(arrays), []
        for names, sizes in zip(fields["names"], fields["sizes"], strict=True):
            found.append(
                {
                    phase: _Sums(names[phase], [next(rest) for _ in range(size)])
                    for phase, size in sizes.items()
                }
            )
        *made._results, made._sums = found
        made._queue = deque(fields["undone"])
        made._left = len(made._queue)
        made.is_restored = True
        return made
