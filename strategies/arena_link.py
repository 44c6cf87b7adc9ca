"""A worker's link between one optimizer's arena and the parts of it on parameter servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from allreduce.strategies.server_options import Worker

from allreduce.events import logger
from allreduce.graph.update.arena_plan import ArenaPlan
from allreduce.graph.update.arenas import publish_iterations
from allreduce.parameters.partition import Part, cut
from allreduce.server.client.parameter_client import Call, ParameterServer
from allreduce.server.protocol.encode import sendable

_OWN = ("iterations", "_arena_plans")  # attributes of an optimizer that are no settings


class ArenaLink:
    """Pushes the gradients of an arena, and pulls its parameters.

    Args:
        servers: All servers; those with an empty part are not called.
        rule: The optimizer.
        plan: The arena.
        worker: This worker.
        turn: Tells the arena from others of the same variables, equally on all workers.
        pipelines: Whether a step begins without waiting for the gradients of the one before.
        gives_newest: Whether a server that has restarted takes the newest parameters that a worker
            has, in place of its checkpoint's older ones.

    Raises:
        UsageError: The optimizer has code of the user's own, which servers do not have.
    """

    def __init__(
        self,
        servers: Sequence[ParameterServer],
        rule: Any,
        plan: ArenaPlan,
        worker: Worker,
        *,
        turn: str,
        pipelines: bool,
        gives_newest: bool,
    ) -> None:
        self.rule, self.plan = rule, plan
        self._arena, self._worker = plan.arenas[0], worker
        self._pipelines, self._gives_newest = pipelines, gives_newest
        self._pending: list[Call] = []  # gradients that were sent without waiting
        layout = plan.layout
        described = repr((layout.spans, layout.dtype.name, type(rule).__name__, rule.all_slots))
        self.key = f"{crc32(described.encode()):08x}-{turn}"
        self._optimizer = sendable(rule)
        parts = cut(layout, len(servers), by_rows=rule.is_elementwise)
        self._servers = [
            (server, part) for server, part in zip(servers, parts, strict=True) if part.size
        ]
        self._seen = [-1] * len(self._servers)  # the version of each server's part that is here
        self._number = 0
        for index in range(len(self._servers)):
            self._register(index, initial=True)
        self._settings = self._settings_now()  # that the servers know
        self.pull()

    # --- registering ---

    def _register(self, index: int, *, initial: bool) -> None:
        """Make the server's store, or find it; wait until it has values.

        Args:
            index: The server.
            initial: Whether only the chief gives values. Else the server has restarted, and any
                worker's copy is better than none.
        """
        server, part = self._servers[index]
        seen = self._seen[index]
        version = int(self._arena.iterations) if initial or seen < 0 else seen
        fields: dict[str, Any] = {"store": self.key}
        fields |= {"part": part.as_json(), "optimizer": self._optimizer}
        fields |= {"dtype": self._arena.layout.dtype.name, "servers": len(self._servers)}
        fields |= {"index": index, "slots": [], "version": version}
        fields["newest"] = self._gives_newest and not initial
        is_chief, values = self._worker.is_chief, []
        if is_chief or not initial:
            values = [self._part_of(self._arena.parameters, part)]
        if is_chief and initial and self._arena.iterations:  # a loaded optimizer
            self.plan.settle(self._arena)
            fields["slots"] = list(self._arena.slots)
            values += [self._part_of(each, part) for each in self._arena.slots.values()]
        reply = self._worker.register(server, "register", fields, "the variables", values)
        if not initial or (is_chief and reply["restored"]):
            what = "goes on" if initial else "has restarted; it goes on"
            logger.warning(
                "[parameter server] %s: %s %s from update %d, %s",
                *(self._worker.task, server.name, what, reply["version"], reply["source"]),
            )
        self._seen[index] = reply["version"] if reply["taken"] else -1

    @staticmethod
    def _part_of(array: np.ndarray, part: Part) -> np.ndarray:
        return array[part.start : part.stop]

    def _call_all(
        self, method: str, fields: Mapping[str, Any], array: np.ndarray | None = None
    ) -> list[tuple[dict[str, Any], Sequence[np.ndarray]]]:
        """Call a method of all servers at once; a server that has restarted gets its part first.

        Args:
            method: The method.
            fields: Its arguments; each server gets the version of its part that is here, too.
            array: An array of the arena, of which each server gets its part.
        """
        self._finish_pending()
        calls = [self._start(i, method, fields, array) for i in range(len(self._servers))]
        replies = []
        for index, call in enumerate(calls):
            server, _ = self._servers[index]
            while (reply := server.finish(call))[0].get("unknown"):
                self._register(index, initial=False)
                call = self._start(index, method, fields, array)
            replies.append(reply)
        return replies

    def _start(
        self, index: int, method: str, fields: Mapping[str, Any], array: np.ndarray | None
    ) -> Call:
        server, part = self._servers[index]
        arrays = [] if array is None else [self._part_of(array, part)]
        own = {"store": self.key, **fields, "seen": self._seen[index]}
        return server.start(method, own, arrays)

    # --- steps ---

    def push(self) -> None:
        """Let the servers update with this worker's gradients, and take the new parameters over.

        With pipelining, these are the ones that the servers sent after the gradients before.
        """
        count = self._arena.count if self.rule.clip_norm is None else self._arena.divisor
        fields: dict[str, Any] = {"count": float(count[0]), "number": 0}
        fields["worker"] = self._servers[0][0].identity
        if not self._pipelines:
            self._number += 1
            fields["number"] = self._number
            self._take(self._call_all("push", fields, self._arena.gradients))
            return
        # Without a number: it is not repeated, and the server may get to the next one before it.
        calls = [
            self._start(index, "push", fields, self._arena.gradients)
            for index in range(len(self._servers))
        ]
        self._finish_pending()
        self._pending = calls

    def _finish_pending(self) -> None:
        """Take over what the servers sent for gradients that were not waited for.

        If a connection was lost meanwhile, or the server has restarted, the gradients are lost:
        their memory has new ones.
        """
        pending, self._pending = self._pending, []
        for index, call in enumerate(pending):
            server, _ = self._servers[index]
            reply = server.finish_or_lose(call)
            if reply is not None and reply[0].get("unknown"):
                self._register(index, initial=False)
            elif reply is not None:
                self._take_one(index, *reply)

    @property
    def count(self) -> float:
        """The number of samples behind the gradients."""
        return float(self._arena.count[0])

    def contribute(self, update: int, share: int, of: int) -> None:
        """Add this worker's gradients to a synchronous update."""
        fields = {"count": self.count, "update": update, "share": share, "of": of}
        self._call_all("contribute", fields, self._arena.gradients)

    def pull(self) -> None:
        """Take the newest parameters over, and the number of updates."""
        self._take(self._call_all("pull", {}))
        publish_iterations(self.rule)

    def assign(self) -> None:
        """Set the servers' parameters to this worker's."""
        for index, (reply, _) in enumerate(self._call_all("assign", {}, self._arena.parameters)):
            self._seen[index] = reply["version"]

    def pull_slots(self) -> None:
        """Read the optimizer's slots into the arena, as for saving the model."""
        for (_, part), (reply, arrays) in zip(
            self._servers, self._call_all("slots", {}), strict=True
        ):
            for name, array in zip(reply["names"], arrays, strict=True):
                self._arena.slots[name][part.start : part.stop] = array

    def save(self) -> None:
        """Have the servers write a checkpoint."""
        self._call_all("save", {})

    def send_settings(self) -> None:
        """Let the servers know if the optimizer's settings have changed, or a server restarted."""
        now = self._settings_now()
        if now != self._settings:
            self._settings, self._optimizer = now, sendable(self.rule)
            self._call_all("configure", {"optimizer": self._optimizer, "if_missing": False})

    def _settings_now(self) -> Any:
        return settings_on([server for server, _ in self._servers], self.rule)

    def _take(self, replies: Sequence[tuple[dict[str, Any], Sequence[np.ndarray]]]) -> None:
        for index, reply in enumerate(replies):
            self._take_one(index, *reply)

    def _take_one(self, index: int, reply: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        _, part = self._servers[index]
        if arrays:
            self._arena.parameters[part.start : part.stop] = arrays[0]
        self._seen[index] = reply["version"]
        self._arena.iterations = max(self._seen)


def settings_on(servers: Sequence[ParameterServer], rule: Any) -> Any:
    """Return an optimizer's settings, and the servers' generations.

    Others may have told a server that has restarted of settings that the chief has changed.
    """
    settings = {name: value for name, value in vars(rule).items() if name not in _OWN}
    return settings, [server.generation for server in servers]
