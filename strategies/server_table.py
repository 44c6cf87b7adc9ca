"""A table that parameter servers hold, as one worker sees it: lookups and gradients of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
from allreduce.strategies.arena_link import settings_on
from allreduce.strategies.server_options import Worker

from allreduce.cluster.host.waiting import Wait
from allreduce.errors import TimeoutError, UnsupportedError
from allreduce.events import logger
from allreduce.graph.trace.variable import Variable
from allreduce.parameters.table_store import SortedRows, add_duplicates, rows_of_servers
from allreduce.server.client.parameter_client import Call, ParameterServer
from allreduce.server.protocol.encode import sendable

# The index of a server, its part of the numbers, and its reply.
_Answer = tuple[int, slice, tuple[dict[str, Any], Sequence[np.ndarray]]]
_BLOCK_ROWS = 1 << 16  # that are initialised together, whatever server has them


class ServerTable:
    """Reads rows, and sends gradients of rows.

    Args:
        servers: All servers; each has a range of the rows.
        name: The table's path.
        shape: `(rows, width)`.
        dtype: Of the rows.
        initialize: Returns the initial values of a block of rows, by its number and size.
        worker: This worker.
        turn: Tells the table from others of the same name, equally on all workers.

    Attributes:
        rows: The number of rows.
        width: The size of a row.
        after: The synchronous update that lookups wait for; -1 for none.
    """

    def __init__(
        self,
        servers: Sequence[ParameterServer],
        name: str,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        initialize: Callable[[int, int], np.ndarray],
        *,
        worker: Worker,
        turn: str,
    ) -> None:
        self.rows, self.width = shape
        self.after = -1
        self._name, self._dtype, self._initialize = name, dtype, initialize
        self._worker = worker
        described = repr((name, shape, dtype.name))
        self.key = f"table-{crc32(described.encode()):08x}-{turn}"
        self._servers = list(zip(servers, rows_of_servers(self.rows, len(servers)), strict=True))
        self._cuts = [low for _, (low, _) in self._servers[1:]]
        self._numbers = np.dtype(np.int32 if self.rows < 1 << 31 else np.int64)
        # The different numbers of each lookup of the step, and the sums of their gradients.
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self._seen = [-1] * len(self._servers)
        self._gave_to: list[int | None] = []  # the generations of the servers with the latest share
        self._pushed = 0
        self._registered = False
        self._optimizer = ""
        self._settings: Any = None  # that the servers know
        self._latest: tuple[np.ndarray, SortedRows] | None = None  # of the latest lookup

    # --- in a step ---

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Copy rows; each server gets one message with the different numbers."""
        rows = self._sorted(numbers)
        self._latest = numbers.copy(), rows
        for index, part, (reply, arrays) in self._look_up(rows.unique):
            rows.spread(part, arrays[0], out)
            self._seen[index] = reply["version"]

    def _sorted(self, numbers: np.ndarray) -> SortedRows:
        return SortedRows(numbers.astype(self._numbers, copy=False))

    def _look_up(self, numbers: np.ndarray) -> list[_Answer]:
        """Look rows up; wait until the servers have the shares of all workers of the update before.

        A server that has restarted since this worker's share goes on without the update.

        Raises:
            TimeoutError: Another worker's share does not come in time.
        """
        timeout = self._worker.timeout
        wait = Wait(timeout)
        while True:
            found = self._call_all("lookup", {"after": self.after}, numbers)
            if not any(reply.get("wait") for _, _, (reply, _) in found):
                return found
            if not wait.has_time_left(f"other workers' rows of table {self._name!r}"):
                raise TimeoutError(
                    f"[parameter server] {self._worker.task}: other workers have not sent their "
                    f"rows of table {self._name!r} within {timeout:g} s; do all of them still run?"
                )

    def __repr__(self) -> str:
        return f"table {self._name!r}"

    def add_gradient(self, numbers: np.ndarray, gradients: np.ndarray) -> None:
        """Keep gradients until the step has ended."""
        latest = self._latest
        if latest is not None and np.array_equal(latest[0], numbers):
            rows = latest[1]
        else:  # there are several lookups in the step
            rows = self._sorted(numbers)
        self._kept.append((rows.unique, rows.sums(gradients)))

    # --- after it ---

    def push(self, rule: Any, count: float) -> None:
        """Let the servers update the rows of the step at once."""
        self._pushed += 1
        fields: dict[str, Any] = {"count": count, "number": self._pushed}
        fields["worker"] = self._servers[0][0].identity
        self._send(rule, "push_rows", fields)

    def contribute(self, rule: Any, count: float, update: int, share: int, of: int) -> None:
        """Add the rows of the step to a synchronous update."""
        fields = {"count": count, "update": update, "share": share, "of": of}
        self._send(rule, "contribute_rows", fields)
        self._gave_to = [server.generation for server, _ in self._servers]

    def save(self) -> None:
        """Have the servers write a checkpoint."""
        for server, _ in self._servers:
            server.call("save", {"store": self.key})

    def discard(self) -> None:
        """Forget gradients that are not sent."""
        self._kept.clear()

    def _send(self, rule: Any, method: str, fields: dict[str, Any]) -> None:
        self._check(rule)
        kept, self._kept = self._kept, []
        if not kept:  # also in an update without rows, others wait for this share
            kept = [(np.zeros(0, self._numbers), np.zeros((0, self.width), self._dtype))]
        unique, sums = kept[0]
        if len(kept) > 1:
            numbers, gradients = (np.concatenate(each) for each in zip(*kept, strict=True))
            unique, sums = add_duplicates(numbers, gradients)
        self.register()  # a step without rows has not looked any up
        servers = [server for server, _ in self._servers]
        if (now := settings_on(servers, rule)) != self._settings:
            self._settings, self._optimizer = now, sendable(rule)
            for server in servers:
                self._configure(server)
        self._call_all(method, fields, unique, sums)

    def _configure(self, server: ParameterServer) -> None:
        """Send the optimizer's settings; those of the chief count, others where there are none."""
        fields = {"store": self.key, "optimizer": self._optimizer}
        server.call("configure", {**fields, "if_missing": not self._worker.is_chief})

    def _check(self, rule: Any) -> None:
        """Refuse optimizers that need more than the rows of a step.

        Raises:
            UnsupportedError: It has norms of whole variables, clips by one, or averages weights.
        """
        for wrong, what in (
            (not rule.is_elementwise, "norms of whole variables"),
            (rule.clip_norm is not None, "clip_norm"),
            (rule.ema_momentum is not None, "ema_momentum"),
            (rule.gradient_accumulation > 1, "gradient_accumulation"),
        ):
            if wrong:
                raise UnsupportedError(
                    f"{type(rule).__name__} with {what} cannot update table {self._name!r}, of "
                    "which a step has some rows only; use SGD, Adagrad or Adam without it"
                )

    # --- calls ---

    def _call_all(
        self, method: str, fields: dict[str, Any], numbers: np.ndarray, *arrays: np.ndarray
    ) -> list[_Answer]:
        """Send each server its rows.

        Args:
            method: The method.
            fields: Its arguments.
            numbers: Different and rising, in the dtype that travels.
            arrays: Arrays with one row for each of the numbers.

        Returns:
            For each server that was called its index, its part of the numbers, and its reply.
        """
        self.register()
        ends = [0, *np.searchsorted(numbers, self._cuts).tolist(), len(numbers)]
        calls: list[tuple[int, slice, Call]] = []
        for index, (low, high) in enumerate(pairwise(ends)):
            if low == high and method == "lookup":
                continue
            part = slice(low, high)
            given = [numbers[part], *(each[part] for each in arrays)]
            calls.append((index, part, self._start(index, method, fields, given)))
        found = []
        for index, part, call in calls:
            server, _ = self._servers[index]
            while (reply := server.finish(call))[0].get("unknown"):
                self._register(index, initial=False)
                call = self._start(index, method, fields, call.arrays)
            found.append((index, part, reply))
        return found

    def _start(
        self, index: int, method: str, fields: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> Call:
        server, _ = self._servers[index]
        own = {**fields, "store": self.key, "seen": self._seen[index]}
        own["loses"] = self.after >= 0 and self._gave_to[index] != server.generation
        return server.start(method, own, arrays)

    def register(self) -> None:
        """Make the table on all servers, or find it; wait until it has values."""
        if not self._registered:
            for index in range(len(self._servers)):
                self._register(index, initial=True)
            self._registered = True

    def _register(self, index: int, *, initial: bool) -> None:
        """Make the server's rows, or find them; wait until they have values."""
        server, (first, stop) = self._servers[index]
        fields = {"store": self.key, "name": self._name, "first": first, "stop": stop}
        fields |= {"width": self.width, "dtype": self._dtype.name}
        fields |= {"index": index, "servers": len(self._servers)}
        fields["fills"] = self._worker.is_chief or not initial
        reply = self._worker.register(
            *(server, "register_table", fields, f"table {self._name!r}"),
            fill=partial(self._fill, index),
        )
        if self._optimizer and not initial:
            self._configure(server)
        if not initial and reply["restored"]:
            logger.warning(
                "[parameter server] %s: table %r on %s goes on from update %d, %s",
                *(self._worker.task, self._name, server.name, reply["version"], reply["source"]),
            )
        elif not initial:
            logger.warning(
                "[parameter server] %s: %s has restarted without a checkpoint; rows %d to %d of "
                "table %r have their initial values again. With checkpoint=, servers keep them",
                *(self._worker.task, server.name, first, stop - 1, self._name),
            )
        self._seen[index] = -1

    def _fill(self, index: int) -> None:
        """Send initial values, block by block; no process holds the whole table."""
        server, (first, stop) = self._servers[index]
        for block in range(first // _BLOCK_ROWS, -(-stop // _BLOCK_ROWS)):
            values = self._initialize(block, _BLOCK_ROWS)
            start = block * _BLOCK_ROWS
            low, high = max(first, start), min(stop, start + len(values))
            fields = {"store": self.key, "row": low, "last": high == stop}
            server.call("fill", fields, [values[low - start : high - start]])


class ServerTables:
    """The tables of a strategy.

    Args:
        new: Makes a table, as `ServerTable` does, by its name, shape, dtype and initial values.
    """

    def __init__(self, new: Callable[..., ServerTable]) -> None:
        self._new = new
        self._made: dict[Variable, ServerTable] = {}  # by the variable in their place

    def make(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        block: Callable[[int, int], np.ndarray],
        anchor: Variable,
    ) -> ServerTable:
        """Make a table, as `Embedding` does in the strategy's scope.

        Args:
            name: Its path.
            shape: `(rows, width)`.
            dtype: Of the rows.
            block: Returns the initial values of a block of rows, by its number and size.
            anchor: The variable in its place, which an optimizer changes.
        """
        made = self._made[anchor] = self._new(name, shape, dtype, block)
        return made

    def of(self, variables: Iterable[Variable]) -> list[ServerTable]:
        """Return the tables in whose place variables are."""
        return [self._made[each] for each in variables if each in self._made] if self._made else []

    def discard(self) -> None:
        """Forget gradients that are not sent."""
        for table in self._made.values():
            table.discard()

    def save(self) -> None:
        """Have the servers write a checkpoint of each."""
        for table in self._made.values():
            table.save()
