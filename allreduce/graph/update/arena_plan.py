"""How an optimizer's variables of one dtype lie in memory, and are cut into buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from allreduce.devices import lookup
from allreduce.devices.names import DeviceName
from allreduce.errors import ShapeError
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.arena_memory import Room
from allreduce.graph.update.bucket_cuts import agree_on_cuts, choose_buckets
from allreduce.graph.update.host import Host
from allreduce.graph.update.sharded_update import EveryonesSlots, agree_to_shard
from allreduce.graph.update.update import UpdateRule
from allreduce.graph.update.zero_update import gather_slots, joined_slots, spread_error
from allreduce.reduction import Arena, Bucket, Layout, Way, lay_out

# How often a variable was updated, in an optimizer's state, where that is not "iterations": an
# optimizer with variables of several dtypes, or in several steps, counts for each.
UPDATES = "updates"


class ArenaPlan:
    """How an optimizer's variables of one dtype lie in memory, and that memory per replica.

    A variable's value lies in the arena of the optimizer that changed it last. Another optimizer
    that is to change it takes it over first, before a step.

    Args:
        rule: The optimizer.
        variables: All on one device, and of one dtype.
        host: Whose replicas have it.
        device: As the replicas' program calls it.

    Attributes:
        buckets: Ranges of the arena that are reduced by one collective each.
        sharded: Which of them are updated in slices, by index, and how.
    """

    def __init__(
        self, rule: UpdateRule, variables: Sequence[Variable], host: Host, device: DeviceName
    ) -> None:
        self.variables = tuple(variables)
        self.device = device  # as the replicas' program calls it
        named = [(variable.name, variable.shape) for variable in variables]
        self.layout: Layout = lay_out(named, variables[0].dtype)
        self.buckets: tuple[Bucket, ...] = choose_buckets(host, rule, self.layout)
        self._replicas = host.num_replicas_in_sync
        agree_on_cuts(host, self.buckets)
        self.sharded = agree_to_shard(host, rule, self.layout, self.buckets)
        self._maps_slots = Way.MAPPED in self.sharded.values()
        self._spreads_slots = bool(self.sharded) and not self._maps_slots
        self._whole_at = 0  # the update since which replicas have no more than their own slots
        self.arenas: list[Arena] = host.on_replicas(
            lambda index: self._room(host, index).arena(rule.slots, self._maps_slots)
        )
        self._everyones = self._meet(host)
        self._make_sums(host)
        self.take_over()

    def _room(self, host: Host, index: int) -> Room:
        device = lookup(host.places[index].names[self.device])
        return Room(device, host.replicas[index].communicator, self.layout)

    def _make_sums(self, host: Host) -> None:
        """Make room for sums that do not lie where gradients do."""
        scattered = [b for b in self.buckets if self.sharded.get(b.index) is Way.SCATTERED]
        if not self._spreads_slots:
            return
        made = host.on_replicas(lambda index: self._room(host, index).sums(scattered))
        for arena, sums in zip(self.arenas, made, strict=True):
            arena.sums = sums

    def _meet(self, host: Host) -> EveryonesSlots | None:
        """Find the slots of all replicas, if each can have its own part of them."""
        communicator = host.replicas[0].communicator
        if not self._maps_slots or communicator is None:
            return None
        return EveryonesSlots(communicator, self.arenas[0])

    def take_over(self) -> None:
        """Bring variables whose values another arena holds, or none, into this one."""
        for place, variable in enumerate(self.variables):
            if variable.home is self:
                continue
            variable.home = None  # until all is done: what is interrupted is done again
            for index, arena in enumerate(self.arenas):
                view = arena.view(arena.parameters, place)
                view[...] = variable.storage[index]
                variable.storage[index] = view
            variable.home = self

    def slots(self, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield an arena's slots as views, keyed "<variable>/<slot>"."""
        arena = self.arenas[0]
        for place, variable in enumerate(self.variables):
            for slot, array in arrays.items():
                yield f"{variable.name}/{slot}", arena.view(array, place)

    def _whole_slots(self) -> dict[str, np.ndarray]:
        """Copy the slots, as an update of all of them would need them."""
        first = self.arenas[0]
        found = self._everyones_slots()
        for key, view in self.slots(found):
            if key in first.loaded:
                view[...] = first.loaded[key]
        return found

    def _everyones_slots(self) -> dict[str, np.ndarray]:
        """Copy the slots that the latest update has left, of all members."""
        first, buckets = self.arenas[0], self._in_slices()
        if self._everyones is not None:
            return self._everyones.whole(first, self.layout, buckets)
        if buckets and not self._is_whole:
            if len(self.arenas) < self._replicas:
                raise spread_error()
            return joined_slots(self.arenas, buckets)
        return {name: array.copy() for name, array in first.slots.items()}

    def _in_slices(self) -> list[Bucket]:
        return [each for each in self.buckets if each.index in self.sharded]

    @property
    def _is_whole(self) -> bool:
        """Whether each replica has the slots of all; in memory that all map they never are."""
        return self._whole_at == self.arenas[0].iterations

    def consolidate(self, host: Host) -> None:
        """Give every replica the slots of all, between two steps; all replicas do so together."""
        if not self._spreads_slots:
            return

        def gather(index: int) -> None:
            communicator = host.replicas[index].communicator
            assert communicator is not None, "one of several"
            gather_slots(communicator, self.arenas[index], self._in_slices())

        host.on_replicas(gather)
        self._whole_at = self.arenas[0].iterations

    def state(self, iterations: int) -> dict[str, np.ndarray]:
        """Copy the slots, and the variables' number of updates where it is not `iterations`."""
        arena = self.arenas[0]
        state = dict(self.slots(self._whole_slots()))
        if arena.iterations != iterations:
            updates = np.asarray(arena.iterations, np.int64)
            state.update({f"{variable.name}/{UPDATES}": updates for variable in self.variables})
        return state

    def load(self, state: Mapping[str, np.ndarray], iterations: int) -> None:
        """Set the slots from `state`; all that is missing or misshapen is found before any is set.

        Raises:
            ShapeError: A slot's value has another shape than its variable.
        """
        for key, view in self.slots(self.arenas[0].slots):
            if key in state and np.shape(state[key]) != view.shape:
                raise ShapeError(
                    f"optimizer state {key!r} has shape {np.shape(state[key])}; expected "
                    f"{view.shape}"
                )
        counts = [state.get(f"{variable.name}/{UPDATES}") for variable in self.variables]
        looked_at = self._maps_slots  # by others, at what is there
        held = {key: np.array(value) for key, value in state.items()} if looked_at else {}
        whole = self._is_whole or all(key in state for key, _ in self.slots(self.arenas[0].slots))
        for arena in self.arenas:
            arena.iterations = max((int(c) for c in counts if c is not None), default=iterations)
            for key, view in self.slots(arena.slots):
                if key in state and not looked_at:
                    view[...] = state[key]
                elif key in state:
                    arena.loaded[key] = held[key]
        self._whole_at = self.arenas[0].iterations if whole else -1

    def settle(self, arena: Arena) -> None:
        """Set an arena's slots to what was loaded."""
        for key, view in self.slots(arena.slots):
            if key in arena.loaded:
                view[...] = arena.loaded[key]
        arena.loaded = {}

    def renew(self, host: Host) -> None:
        """Let what is symmetric lie in new memory, and make all replicas what the first one is.

        The old gradients go first: nobody reads what a step left there. What is interrupted can be
        done again.
        """
        self._make_alike()
        host.on_replicas(lambda index: self._move(host, index))
        self._everyones = self._meet(host)

    def _make_alike(self) -> None:
        """Make all replicas what the first one is, without gradients, and with all of the slots."""
        first, slots = self.arenas[0], self._whole_slots()
        for arena in reversed(self.arenas):  # what is loaded goes last: until then it can be redone
            arena.gradients = arena.gradients[:0].copy()
            arena.iterations = first.iterations
            arena.parameters[...] = first.parameters
            for name, array in arena.slots.items():
                array[...] = slots[name]
            arena.loaded = {}
        self._everyones, self._whole_at = None, first.iterations

    def _move(self, host: Host, index: int) -> None:
        """Give one replica's arena new memory, for one kind of arrays after the other."""
        room, arena = self._room(host, index), self.arenas[index]
        if self._maps_slots:
            arena.parameters = room.moved(arena.parameters)
            for place, variable in enumerate(self.variables):
                if variable.home is self:
                    variable.storage[index] = arena.view(arena.parameters, place)
            for name in arena.slots:
                arena.slots[name] = room.moved(arena.slots[name])
        # Until now their room was for the others, one by one.
        arena.gradients = room.symmetric(self.layout.size, self.layout.dtype)
