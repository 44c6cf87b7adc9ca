"""Variables that steps assign, such as BatchNorm's moving averages: the chief's values count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
from allreduce.strategies.server_options import Worker

from allreduce.devices import read, write
from allreduce.graph.replicate.compiled import Compiled
from allreduce.graph.trace.variable import Variable
from allreduce.parameters.partition import Part
from allreduce.server.client.parameter_client import ParameterServer

_PREFIX = "state-"  # of the keys


def is_state(key: str) -> bool:
    """Return whether a server's store has such variables, which have no updates."""
    return key.startswith(_PREFIX)


def assigned_variables(compiled: Compiled) -> list[Variable]:
    """List the variables that a step assigns, by name."""
    found = {n.attrs["variable"] for n in compiled.graph.nodes if n.op == "assign"}
    return sorted(found, key=lambda each: each.name)


class ServerState:
    """Copies of variables on the first server, which the chief writes and the others read.

    Each worker's steps change its own variables in between.

    Args:
        server: The first server.
        variables: The variables; they travel together, in float64.
        worker: This worker.
        turn: Tells the variables from others of the same names, equally on all workers.

    Attributes:
        variables: The variables.
    """

    def __init__(
        self,
        server: ParameterServer,
        variables: Sequence[Variable],
        worker: Worker,
        turn: str,
    ) -> None:
        self._server, self.variables, self._worker = server, list(variables), worker
        named, place = [], 0
        for each in variables:
            size = read(each.storage[0]).size
            named.append((each.name, place, place + size))
            place += size
        self._places = [slice(low, high) for _, low, high in named]
        part = Part(0, place, tuple(named))
        self.key = f"{_PREFIX}{crc32(repr(named).encode()):08x}-{turn}"
        self._fields: dict[str, Any] = {"store": self.key, "part": part.as_json()}
        self._fields |= {"optimizer": None, "dtype": "float64", "servers": 1}
        self._fields |= {"index": 0, "slots": [], "version": 0, "newest": False}
        self._register(gives=worker.is_chief)
        self.fetch()

    def _register(self, *, gives: bool) -> None:
        values = [self._values()] if gives else []
        some = str([each.name for each in self.variables][:3])
        self._worker.register(self._server, "register", self._fields, some, values)

    def _values(self) -> np.ndarray:
        parts = [read(each.storage[0]).reshape(-1) for each in self.variables]
        return np.concatenate([each.astype(np.float64) for each in parts])

    def _call(self, method: str, fields: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> Any:
        own = {**fields, "store": self.key}
        while (reply := self._server.call(method, own, arrays))[0].get("unknown"):
            self._register(gives=True)
        return reply

    def publish(self) -> None:
        """Write the chief's values; other workers do nothing."""
        if self._worker.is_chief:
            self._call("assign", {}, [self._values()])

    def save(self) -> None:
        """Have the server write a checkpoint."""
        self._call("save", {})

    def fetch(self) -> None:
        """Take the chief's values over."""
        _, (values,) = self._call("pull", {"seen": -1})
        for variable, place in zip(self.variables, self._places, strict=True):
            target = variable.storage[0]
            write(target, values[place].astype(target.dtype).reshape(target.shape))
