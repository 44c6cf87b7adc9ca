"""The interface through which updates reach the replicas of this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from allreduce.devices.names import DeviceName
from allreduce.graph.placement.device_map import Places
from allreduce.graph.trace.rank_digest import RankDigest
from allreduce.graph.trace.replica import Replica
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.update import UpdateRule


class Host(Protocol):
    """The replicas of this process, as compiling a step needs them."""

    @property
    def devices(self) -> Sequence[DeviceName]: ...
    @property
    def places(self) -> Sequence[Places]: ...
    @property
    def replicas(self) -> Sequence[Replica]: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def shared(self) -> weakref.WeakSet[Variable]: ...
    @property
    def rank_digest(self) -> RankDigest: ...

    def check_update(self, rule: UpdateRule, number: int) -> None: ...
    def on_replicas(self, work: Callable[[int], Any]) -> list[Any]: ...
