"""Lay out an optimizer's variables of one dtype in arenas, and cut these into buckets.

The arrays lie in private memory, or in memory that all members map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce import events
from allreduce.comm import Communicator, world
from allreduce.comm.fused_update import updates
from allreduce.devices import Buffer, Device, lookup, options, read, write
from allreduce.devices.names import DeviceName
from allreduce.errors import ShapeError, UsageError, did_you_mean
from allreduce.graph.consistency.rank_check import Fact, compare, mismatch
from allreduce.graph.core import pass_switches
from allreduce.graph.core.naming import own_part
from allreduce.graph.core.spec import show
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.accumulation import Accumulation
from allreduce.graph.update.sharded_update import (
    agree_to_shard,
    gather_slots,
    joined_slots,
    mapped_slots,
    sharded_slots_error,
)
from allreduce.graph.update.update import LocalReplicas, UpdateRule
from allreduce.reduction import (
    BUCKET_BYTES,
    Arena,
    Bucket,
    Layout,
    ShardMode,
    cut_buckets,
    lay_out,
    plan_buckets,
    slice_of,
)

# The key of a variable's number of updates in an optimizer's state, if it is not "iterations": an
# optimizer with variables of several dtypes, or in several steps, counts them separately.
UPDATES = "updates"


class ArenaPlan:
    """The layout of an optimizer's variables of one dtype, and each replica's arena.

    A variable's value lies in the arena of the optimizer that changed it last. Before another
    optimizer changes the variable, its arena takes the value over.

    Args:
        rule: The optimizer.
        variables: Variables on one device and of one dtype.
        host: The replicas of this process.
        device: The device's name in the replicas' program.

    Attributes:
        buckets: The ranges of the arena that one collective each reduces.
        sharded: The buckets with sharded updates, by index, and the mode of each.
        accumulation: Counts the micro-batches of an update.
        wire: The dtype of the gradients that replicas exchange, if it is not the arena's.
    """

    def __init__(
        self,
        rule: UpdateRule,
        variables: Sequence[Variable],
        host: LocalReplicas,
        device: DeviceName,
    ) -> None:
        self.variables = tuple(variables)
        self.device = device
        self._rule, self._fixed_options = rule, rule.fixed_options
        named = [(variable.name, variable.shape) for variable in variables]
        self.layout: Layout = lay_out(named, variables[0].dtype)
        self.buckets: tuple[Bucket, ...] = choose_buckets(host, rule, self.layout)
        self._average_slots = rule.average_slots
        self._replicas = host.num_replicas_in_sync
        self.wire = options.current().mixed_precision if self.layout.dtype == np.float32 else None
        agree_on_exchange(host, self.buckets)
        self.sharded = agree_to_shard(host, rule, self.layout, self.buckets, device)
        first = host.replicas[0].communicator
        # Whether replicas read each other's slots.
        self._maps_slots = bool(self.sharded) and first is not None and updates(first)
        self._spreads_slots = bool(self.sharded) and not self._maps_slots
        self._whole_at = 0  # the number of updates at which all replicas had all slots
        self.arenas: list[Arena] = host.on_replicas(
            lambda index: self._allocator(host, index).arena(rule.all_slots, self._maps_slots)
        )
        self.accumulation = Accumulation(rule, variables, self.arenas)
        self._gathered = self._meet(host)
        self._make_sums(host)
        self.take_over()

    def _allocator(self, host: LocalReplicas, index: int) -> ArenaAllocator:
        device = lookup(host.places[index].names[self.device])
        return ArenaAllocator(device, host.replicas[index].communicator, self.layout)

    def _make_sums(self, host: LocalReplicas) -> None:
        """Allocate sums that are not stored with the gradients."""
        scattered = [b for b in self.buckets if self.sharded.get(b.index) is ShardMode.SCATTERED]
        if not scattered:
            return
        made = host.on_replicas(lambda index: self._allocator(host, index).sums(scattered))
        for arena, sums in zip(self.arenas, made, strict=True):
            arena.sums = sums

    def _meet(self, host: LocalReplicas) -> list[dict[str, np.ndarray]] | None:
        """Map the slots of all replicas, if their memory can be mapped."""
        communicator = host.replicas[0].communicator
        if not self._maps_slots or communicator is None:
            return None
        return mapped_slots(communicator, self.arenas[0])

    def check(self) -> None:
        """Check the optimizer's settings before the next update.

        Raises:
            UsageError: A setting makes no sense, or an option was turned on or off.
        """
        now, kind = self._rule.fixed_options, type(self._rule).__name__
        for name, was in self._fixed_options.items():
            if now[name] != was:
                raise UsageError(
                    f"{kind}.{name} was set to {getattr(self._rule, name)!r} after its first step; "
                    "a number may become another one then, but what an optimizer does is fixed: "
                    "make another optimizer"
                )
        self._rule.check(self.arenas[0].iterations + 1)

    def take_over(self) -> None:
        """Move the values of variables that are not in this arena into it."""
        for place, variable in enumerate(self.variables):
            if variable.home is self:
                continue
            variable.home = None  # set last, so that an interrupted move is repeated
            for index, arena in enumerate(self.arenas):
                view = arena.view(arena.parameters, place)
                write(view, variable.storage[index])
                variable.storage[index] = view
            variable.home = self

    def slots(self, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield an arena's slots as views, keyed "<variable>/<slot>"."""
        arena = self.arenas[0]
        for place, variable in enumerate(self.variables):
            for slot, array in arrays.items():
                yield f"{variable.name}/{slot}", arena.view(array, place)

    def _whole_slots(self) -> dict[str, np.ndarray]:
        """Copy all slots, including loaded values that no update has used yet."""
        first = self.arenas[0]
        found = self._gathered_slots()
        for key, view in self.slots(found):
            if key in first.loaded:
                view[...] = first.loaded[key]  # copies on the host
        return found

    def _gathered_slots(self) -> dict[str, np.ndarray]:
        """Copy all members' slots as of the latest update."""
        first, buckets = self.arenas[0], self._sharded_buckets()
        if self._gathered is not None:
            return joined_slots(first, self._gathered, buckets)
        if buckets and not self._is_whole:
            if len(self.arenas) < self._replicas:
                raise sharded_slots_error()
            return joined_slots(first, [arena.slots for arena in self.arenas], buckets)
        return {name: read(array) for name, array in first.slots.items()}

    def _sharded_buckets(self) -> list[Bucket]:
        return [each for each in self.buckets if each.index in self.sharded]

    @property
    def _is_whole(self) -> bool:
        """Whether each replica has all slots; never true of mapped slots."""
        return self._whole_at == self.arenas[0].iterations

    def consolidate(self, host: LocalReplicas) -> None:
        """Gather all slots on every replica, between two steps; all replicas call this."""
        if not self._spreads_slots:
            return

        def gather(index: int) -> None:
            communicator = host.replicas[index].communicator
            assert communicator is not None, "one of several"
            gather_slots(communicator, self.arenas[index], self._sharded_buckets())

        host.on_replicas(gather)
        self._whole_at = self.arenas[0].iterations

    def state(self, iterations: int) -> dict[str, np.ndarray]:
        """Copy the slots, and the number of updates if it is not `iterations`."""
        arena = self.arenas[0]
        state = dict(self.slots(self._whole_slots()))
        if arena.iterations != iterations:
            updates = np.asarray(arena.iterations, np.int64)
            state.update({f"{variable.name}/{UPDATES}": updates for variable in self.variables})
        return state

    def load(self, state: Mapping[str, np.ndarray], iterations: int) -> None:
        """Set the slots from `state`, after checking all shapes.

        Raises:
            ShapeError: A slot's value does not have its variable's shape.
        """
        for key, view in self.slots(self.arenas[0].slots):
            if key in state and np.shape(state[key]) != view.shape:
                raise ShapeError(
                    f"optimizer state {key!r} has shape {np.shape(state[key])}; expected "
                    f"{view.shape}"
                )
        state = {**state, **self._missing_averages(state)}
        counts = [state.get(f"{variable.name}/{UPDATES}") for variable in self.variables]
        is_mapped = self._maps_slots  # other members may read the old values now
        held = {key: np.array(value) for key, value in state.items()} if is_mapped else {}
        whole = self._is_whole or all(key in state for key, _ in self.slots(self.arenas[0].slots))
        for arena in self.arenas:
            arena.iterations = max((int(c) for c in counts if c is not None), default=iterations)
            for key, view in self.slots(arena.slots):
                if key in state and not is_mapped:
                    write(view, np.asarray(state[key], view.dtype))
                elif key in state:
                    arena.loaded[key] = held[key]
        self._whole_at = self.arenas[0].iterations if whole else -1
        self.accumulation.discard()

    def _missing_averages(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copy the parameters as the averages that a state has not got."""
        return {
            key: read(variable.storage[0])
            for variable in self.variables
            for slot in self._average_slots
            if (key := f"{variable.name}/{slot}") not in state
        }

    def settle(self, arena: Arena) -> None:
        """Copy loaded values to an arena's slots."""
        for key, view in self.slots(arena.slots):
            if key in arena.loaded:
                write(view, arena.loaded[key])
        arena.loaded = {}

    def renew(self, host: LocalReplicas) -> None:
        """Move symmetric arrays to new memory, and set all replicas to the first one's state.

        The old gradients are freed first, as nothing reads them after a step. An interrupted call
        can be repeated.
        """
        self._make_alike()
        host.on_replicas(lambda index: self._move(host, index))
        self._gathered = self._meet(host)

    def _make_alike(self) -> None:
        """Set all replicas to the first one's state, without gradients and with all slots."""
        self.accumulation.discard()
        first, slots = self.arenas[0], self._whole_slots()
        for arena in reversed(self.arenas):  # the first one last, so that this can be repeated
            arena.gradients = np.empty(0, self.layout.dtype)
            arena.iterations = first.iterations
            if arena is not first:
                write(arena.parameters, first.parameters)
            for name, array in arena.slots.items():
                write(array, slots[name])
            arena.loaded = {}
        self._gathered, self._whole_at = None, first.iterations

    def _move(self, host: LocalReplicas, index: int) -> None:
        """Give one replica's arena new memory, for one kind of arrays after the other."""
        allocator, arena = self._allocator(host, index), self.arenas[index]
        if self._maps_slots:
            arena.parameters = allocator.moved(arena.parameters)
            for place, variable in enumerate(self.variables):
                if variable.home is self:
                    variable.storage[index] = arena.view(arena.parameters, place)
            for name in arena.slots:
                arena.slots[name] = allocator.moved(arena.slots[name])
        # Until now their memory was for the others, one by one.
        arena.gradients = allocator.symmetric(self.layout.size, self.layout.dtype)


def choose_buckets(host: LocalReplicas, rule: UpdateRule, layout: Layout) -> tuple[Bucket, ...]:
    """Cut a new arena into buckets by size or by variable names."""
    if not pass_switches.is_on("bucket"):
        return plan_buckets(layout, 0)
    chosen = options.current().buckets
    if not isinstance(chosen, tuple):
        return plan_buckets(layout, BUCKET_BYTES if chosen is None else chosen)
    named = [i for i, span in enumerate(layout.spans) if _is_named(span.name, chosen)]
    if named or not chosen:
        return cut_buckets(layout, [i for i in named if i])
    if host.replicas[0].id == 0 and len(layout.spans) > 1:
        _warn_of_unknown(rule, layout, chosen)
    return plan_buckets(layout, BUCKET_BYTES)


def _is_named(name: str, chosen: Sequence[str]) -> bool:
    return name in chosen or own_part(name) in chosen


def _warn_of_unknown(rule: UpdateRule, layout: Layout, chosen: Sequence[str]) -> None:
    """Warn if no variable has a chosen name, unless names of another optimizer's are meant."""
    shown = ", ".join(map(repr, chosen[:3])) + (", ..." if len(chosen) > 3 else "")
    near = did_you_mean(chosen[0], [span.name for span in layout.spans])
    events.logger.warning(
        "%s: no bucket begins with %s, as it updates no variable of such a name: buckets are cut "
        "by size%s",
        *(type(rule).__name__, shown, near),
    )


def agree_on_exchange(host: LocalReplicas, buckets: Sequence[Bucket]) -> None:
    """Check that all ranks cut a new arena equally, and exchange its gradients as one dtype.

    Raises:
        MismatchError: `ar.config.set_buckets` or `ar.config.set_mixed_precision` is not the same on
            all ranks; on all of them.
    """
    if len(host.devices) == host.num_replicas_in_sync:
        return
    chosen, here = options.current().buckets, world().rank
    how = f"ar.config.set_buckets({list(chosen) if isinstance(chosen, tuple) else chosen!r})"
    if not pass_switches.is_on("bucket"):
        how = 'ar.config.passes["bucket"] = False'
    cuts = str([each.first for each in buckets])
    facts = {
        "the mixed precision": Fact(
            f"ar.config.set_mixed_precision({options.current().mixed_precision!r})",
            "set it on every rank, before the first step",
        ),
        "the choice of buckets": Fact(how, "choose alike on every rank", cuts),
    }

    def one(index: int) -> None:
        communicator = host.replicas[index].communicator
        assert communicator is not None, "one of several"
        facts_by_rank = compare(communicator, here, "how gradients are exchanged", facts)
        found = {tuple(fact.shown for fact in each.values()) for each in facts_by_rank.values()}
        if len(found) > 1:  # otherwise variables differ, which the step checksum reports
            raise mismatch(f"rank {here}", facts_by_rank)

    host.on_replicas(one)


def contents_of(layout: Layout) -> list[tuple[int, str]]:
    """Describe the contents of one of an arena's arrays, for error messages."""
    return [
        (
            span.size * layout.dtype.itemsize,
            f"{layout.dtype}{show(span.shape)} of {span.name!r}, its value, gradient or slot",
        )
        for span in layout.spans
    ]


@dataclass(frozen=True, slots=True)
class ArenaAllocator:
    """Allocates one replica's arrays of an arena.

    Attributes:
        device: The device.
        communicator: The replica's communicator; None for a single replica.
        layout: The arena's layout.
    """

    device: Device
    communicator: Communicator | None
    layout: Layout

    def arena(self, slots: Sequence[str], maps_all: bool) -> Arena:
        """Make an arena; with several replicas, all of them map its gradients.

        Args:
            slots: The names of the optimizer's slots.
            maps_all: Whether the replicas also map parameters and slots.
        """
        shared = self.private if self.communicator is None else self.symmetric
        dtype = self.layout.dtype
        divisor = self.device.allocate(dtype.itemsize).array(dtype, (1,))
        return Arena(self.layout, slots, shared if maps_all else self.private, shared, divisor)

    def sums(self, buckets: Sequence[Bucket]) -> dict[int, np.ndarray]:
        """Allocate the sums of this replica's slices, by bucket."""
        members = self.communicator
        assert members is not None, "one of several"
        own = [slice_of(each, self.layout, members.size, members.rank) for each in buckets]
        return {
            each.index: self.private(part.stop - part.start, self.layout.dtype)
            for each, part in zip(buckets, own, strict=True)
        }

    def moved(self, old: np.ndarray) -> np.ndarray:
        """Copy an array into memory that all members map."""
        new = self.symmetric(self.layout.size, self.layout.dtype)
        write(new, old)
        return new

    def private(self, size: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return zeros in the device's memory."""
        memory = self.device.allocate(size * dtype.itemsize, contents_of(self.layout))
        array: np.ndarray = memory.array(dtype, (size,))
        return array

    def symmetric(self, size: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return zeros in the communicator's memory, which is counted as the device's.

        A communicator has none on devices with memory of their own.
        """
        assert self.communicator is not None, "one of several"
        if not self.device.name.on_host:
            return self.private(size, dtype)
        taken = self.device.memory.take(size * dtype.itemsize, contents_of(self.layout))
        try:
            made: np.ndarray = self.communicator.empty((size,), dtype)
        except BaseException:
            self.device.memory.give_back(taken)
            raise
        shared = Buffer.of(made, self.device, symmetric=True)
        while isinstance(made.base, np.ndarray):  # the owner, which all views keep alive
            made = made.base
        self.device.memory.until_gone(taken, made)
        array: np.ndarray = shared.array(dtype, (size,))
        array[...] = 0
        return array
