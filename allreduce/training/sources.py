"""Sources of batches, one epoch after another: arrays, or any iterable of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from allreduce.data import ArrayBatches, Plan, Replicated, Sharded, split_rows
from allreduce.data.batches import feeding
from allreduce.data.prefetch import Stager, prefetch
from allreduce.data.sharding import starts
from allreduce.errors import MismatchError, ShapeError, UsageError, everywhere
from allreduce.events import logger
from allreduce.graph.core import pytree
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.training.arrays import (
    Samples,
    as_batch,
    describe,
    length_of,
    one_pass,
    with_class_weight,
)
from allreduce.training.facts import digest
from allreduce.training.ranks import gather_integers, gather_texts, raise_together, rank_of, size_of

Batch = tuple[Any, ...]  # the arguments of a step: structures of PerReplica
Batches = closing[Generator[Batch, None, None]]


Order = Callable[[int], np.ndarray]  # the number of the pass: a permutation of this rank's rows


class Source(ABC):
    """Gives the batches of one epoch after another.

    Args:
        limit: How many batches an epoch has at most, or None for a whole pass.
        goes_on: Whether an epoch goes on in the pass where the last one ended, and in another at
            its end, instead of in a new pass.

    Attributes:
        steps: How many batches an epoch has; None if it is not known.
    """

    steps: int | None

    def __init__(self, limit: int | None, goes_on: bool) -> None:
        self._limit, self._goes_on = limit, goes_on and limit is not None
        self._passes = 0  # begun
        self._open: Generator[Batch, None, None] | None = None

    @abstractmethod
    def _pass(self, order: Order | None, limit: int | None) -> Generator[Batch, None, None]:
        """Iterate the batches of a pass, at most `limit`."""

    def epoch(self, order: Order | None = None) -> Batches:
        """Iterate the batches of the next epoch; all ranks get as many."""
        return closing(self._going_on(order) if self._goes_on else self._begin(order, self._limit))

    def _begin(self, order: Order | None, limit: int | None) -> Generator[Batch, None, None]:
        self._passes += 1
        return self._pass(order, limit)

    def _going_on(self, order: Order | None) -> Generator[Batch, None, None]:
        assert self._limit is not None
        taken = 0
        while taken < self._limit:
            begun = self._open is None
            if self._open is None:
                self._open = self._begin(order, None)
            batch = next(self._open, None)
            if batch is not None:
                taken += 1
                yield batch
            elif begun:
                return
            else:
                self._open = None

    def close(self) -> None:
        """End the thread that makes batches."""
        if self._open is not None:
            self._open.close()


class ArraySource(Source):
    """Arrays, cut into global batches; with `sharded` its construction is a collective call.

    Args:
        samples: This rank's arrays.
        sharded: Whether each rank has rows of its own.
        kind: What errors put before "x".
        steps: How many batches an epoch has; None for all.
        goes_on: As for every `Source`.

    Attributes:
        rows: How many rows this rank has.
    """

    def __init__(
        self,
        replicator: Replicator,
        samples: Samples,
        batch_size: int,
        sharded: bool = False,
        kind: str = "",
        steps: int | None = None,
        goes_on: bool = False,
    ) -> None:
        super().__init__(steps, goes_on)
        self._replicator, self._given, self._arrays = replicator, samples.given, samples.arrays
        self.rows = samples.rows
        self._plan = _share_out(replicator, samples.rows, batch_size, sharded, f"{kind}x")
        passed = self._plan.steps
        self.steps: int | None = (
            passed if steps is None else steps if goes_on else min(steps, passed)
        )

    def _pass(self, order: Order | None, limit: int | None) -> Generator[Batch, None, None]:
        permutation = None if order is None else order(self._passes - 1)
        batches = iter(ArrayBatches(self._arrays, self._plan, self._replicator, permutation))
        plain = all(isinstance(each, np.ndarray) for each in self._given)
        with closing(batches):
            for batch in islice(batches, limit):
                if plain:
                    yield batch
                    continue
                leaves = iter(batch)

                def put(leaf: Any, leaves: Iterator[Any] = leaves) -> Any:
                    return None if leaf is None else next(leaves)

                yield pytree.map_leaves(put, self._given)


def _share_out(replicator: Replicator, own: int, batch_size: int, sharded: bool, name: str) -> Plan:
    """Plan which replica takes which rows, over all ranks."""
    if not sharded:
        return Replicated(own, batch_size, replicator.num_replicas_in_sync)
    table = gather_integers(
        replicator, "how many rows ranks have", [own, replicator.local_replicas]
    )
    rows, replicas = (tuple(int(each) for each in column) for column in table.T)
    if not sum(rows):
        raise UsageError(f"{name} is empty on every rank")
    return Sharded(rows, batch_size, replicas)


_ENDED, _RAISED = -1, -2


@dataclass(frozen=True, slots=True)
class _Made:
    """A batch, cut into parts for this process's replicas."""

    samples: Samples
    parts: list[tuple[Any, ...]]  # of each array
    sizes: tuple[int, ...]  # of each local replica
    kind: str


class IterableSource(Source):
    """Batches from a generator, a DataLoader or any other iterable.

    Each rank goes through its own iterable. By default all ranks' batches are equal, global
    batches, of which each replica takes its rows; with `sharded` the global batch is all ranks'
    batches together. Ranks exchange before each step whether they have a batch: when one has come
    to its end, all end the epoch.

    Its construction is a collective call.

    Args:
        batches: Iterated anew for each pass, or once if it is an iterator; nothing is drawn from an
            iterator before the epoch that needs it.
        sharded: Whether each rank has batches of its own.
        what: What errors call a batch of it: "batch", "validation batch".
        steps: How many batches an epoch has; None for a whole pass.
        prepare: Checks a batch's samples against the model; gets them and what errors call them.
        goes_on: As for every `Source`; an iterator always does.
    """

    def __init__(
        self,
        replicator: Replicator,
        batches: Any,
        *,
        sharded: bool,
        what: str,
        steps: int | None,
        prepare: Callable[[Samples, str], None],
        class_weight: Mapping[int, float] | None = None,
        goes_on: bool = False,
    ) -> None:
        once = isinstance(batches, Iterator)
        super().__init__(steps, goes_on and not once)
        self._replicator, self._batches, self._sharded = replicator, batches, sharded
        self._what, self._prepare, self._class_weight = what, prepare, class_weight
        self._alone = size_of(replicator) == 1
        here = [replicator.local_replicas]
        self._replicas = gather_integers(replicator, "how many replicas ranks have", here)[
            :, 0
        ].tolist()
        self._first: tuple[int, str] | None = None  # its number and kind
        self._count = 0
        length = None if once else length_of(batches)
        self.steps = steps if steps is not None else length

    def _pass(
        self,
        order: Order | None,  # noqa: ARG002
        limit: int | None,
    ) -> Generator[Batch, None, None]:
        numbered = enumerate(islice(one_pass(self._batches), limit), self._count)
        made = prefetch(self._made(numbered), feeding(self._replicator))
        with closing(made):
            while (batch := self._next(made)) is not None:
                self._count += 1
                yield batch

    def _made(self, numbered: Iterator[tuple[int, Any]]) -> Generator[_Made, None, None]:
        """Convert batches, check them and cut them; runs in the thread that works ahead."""
        stager = Stager(self._replicator)
        for number, batch in numbered:
            name = f"{self._what} {number}"
            samples = as_batch(batch, name)
            if self._class_weight:
                samples = with_class_weight(samples, self._class_weight)
            kind = describe(samples)
            if self._first is None:
                self._first = number, kind
            elif kind != self._first[1]:
                raise ShapeError(
                    f"{name} has {kind}, but {self._what} {self._first[0]} had {self._first[1]}; "
                    "give batches of the same shapes and dtypes, but for the rows"
                )
            sizes, offsets = self._own_rows(samples.rows)
            parts = [
                tuple(
                    stager.put(index, array[offset : offset + size], own=False)
                    for index, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
                )
                for array in samples.arrays
            ]
            stager.finish()
            yield _Made(samples, parts, sizes, kind)

    def _own_rows(self, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of this process's parts of a batch, and their places in it."""
        replicator = self._replicator
        if self._sharded:
            sizes = split_rows(rows, replicator.local_replicas)
            return sizes, starts(sizes)
        sizes = split_rows(rows, replicator.num_replicas_in_sync)
        own = slice(replicator.first_replica, replicator.first_replica + replicator.local_replicas)
        return sizes[own], starts(sizes)[own]

    def _next(self, made: Iterator[_Made]) -> Batch | None:
        """Return the next batch on this rank; None where a rank has come to the end."""
        batch: _Made | None = None
        error: Exception | None = None
        try:
            batch = next(made, None)
            if batch is not None:
                self._prepare(batch.samples, f"{self._what} {self._count}: ")
        except Exception as raised:
            if self._alone:
                raise
            error = raised
        if self._alone:
            return None if batch is None else self._placed(batch, batch.sizes, 0)
        state = _RAISED if error else _ENDED if batch is None else batch.samples.rows
        compared = 0 if batch is None else self._compared(batch)
        found = gather_integers(self._replicator, f"the next {self._what}", [state, compared])
        if (found[:, 0] == _RAISED).any():
            raise_together(self._replicator, f"{self._what} {self._count}", error)
        ended = found[:, 0] == _ENDED
        if ended.any():
            if not ended.all() and rank_of(self._replicator) == 0:
                logger.warning(
                    "the batches of rank %d have ended after %d; all ranks end here",
                    *(int(ended.argmax()), self._count),
                )
            return None
        if len(set(found[:, 1].tolist())) > 1:
            self._differ(batch)
        return self._joined(batch, found[:, 0].tolist())

    def _compared(self, batch: _Made) -> int:
        """Return what has to be equal on all ranks: the kind, and without `sharded` the values."""
        text = batch.kind
        if not self._sharded:
            text += "".join(f"{len(array)} {digest(array)}" for array in batch.samples.arrays)
        return crc32(text.encode())

    def _differ(self, batch: _Made | None) -> None:
        assert batch is not None, "no rank has come to the end"
        kinds = gather_texts(self._replicator, f"the kinds of {self._what}", batch.kind)
        here = f"{self._what} {self._count} on rank {rank_of(self._replicator)}"
        if len(set(kinds)) > 1:
            shown = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise everywhere(MismatchError(f"{here}: ranks have batches of other kinds: {shown}"))
        raise everywhere(
            MismatchError(
                f"{here}: ranks have batches with different rows or values; make the same on every "
                'rank, or pass data="sharded" if each rank has batches of its own'
            )
        )

    def _joined(self, batch: _Made | None, rows: list[int]) -> Batch:
        assert batch is not None, "no rank has come to the end"
        replicator = self._replicator
        if not self._sharded:
            sizes = split_rows(batch.samples.rows, replicator.num_replicas_in_sync)
            return self._placed(batch, sizes, 0)
        every = [split_rows(*each) for each in zip(rows, self._replicas, strict=True)]
        before = sum(rows[: rank_of(replicator)])
        return self._placed(batch, tuple(size for sizes in every for size in sizes), before)

    def _placed(self, batch: _Made, sizes: tuple[int, ...], before: int) -> Batch:
        """Make the step's arguments.

        Args:
            sizes: How many rows each replica of any rank has.
            before: The index of this rank's first row in the global batch, where it is its own.
        """
        own, offsets = self._own_rows(batch.samples.rows)
        parts = iter(batch.parts)

        def put(leaf: Any) -> Any:
            if leaf is None:
                return None
            return PerReplica(
                values=next(parts),
                weights=own,
                offsets=tuple(before + offset for offset in offsets),
                rows_per_replica=sizes,
            )

        made: Batch = pytree.map_leaves(put, batch.samples.given)
        return made
