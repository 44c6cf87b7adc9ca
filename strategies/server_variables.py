"""What a worker's strategy has on parameter servers: arenas, tables, and assigned variables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from allreduce.strategies.arena_link import ArenaLink
from allreduce.strategies.server_options import ServerOptions, Worker
from allreduce.strategies.server_state import ServerState, assigned_variables
from allreduce.strategies.server_table import ServerTable, ServerTables

from allreduce.graph.replicate.compiled import Compiled
from allreduce.graph.update.arena_plan import ArenaPlan
from allreduce.server.client.parameter_client import ParameterServer


class ServerVariables:
    """The variables on all servers: sends gradients and assigned values, and reads parameters.

    Args:
        servers: All servers.
        options: The strategy's options.
        worker: This worker.
        number: The number of the strategy in this program.

    Attributes:
        tables: The tables.
        assigned: Whether the program has assigned a variable since the servers were told.
    """

    def __init__(
        self,
        servers: Sequence[ParameterServer],
        options: ServerOptions,
        worker: Worker,
        number: int,
    ) -> None:
        self._servers, self._options, self._worker = servers, options, worker
        self._turn = str(number)
        self._links: dict[int, ArenaLink] = {}  # by id of the plan
        new = partial(ServerTable, servers, worker=self._worker, turn=self._turn)
        self.tables = ServerTables(new)
        self._states: list[ServerState] = []
        self.assigned = False

    # --- registering ---

    def register(self, compiled: Compiled) -> None:
        """Register all that a step updates, also the tables that it looks up only when it runs."""
        for link in self.prepare(compiled):
            for table in self.tables.of(link.plan.variables):
                table.register()

    def prepare(self, compiled: Compiled) -> list[ArenaLink]:
        """Return the links of the arenas that a step updates; new ones register with the servers.

        Variables that the step assigns get the chief's values.
        """
        if any(id(plan) not in self._links for _, plan in compiled.updates):
            known = {each for state in self._states for each in state.variables}
            new = [each for each in assigned_variables(compiled) if each not in known]
            if new:
                state = ServerState(self._servers[0], new, self._worker, self._turn)
                self._states.append(state)
        return [self._link(rule, plan) for rule, plan in compiled.updates]

    def _link(self, rule: Any, plan: ArenaPlan) -> ArenaLink:
        found = self._links.get(id(plan))
        if found is None:
            same = [e for e in self._links.values() if set(e.plan.variables) & set(plan.variables)]
            found = self._links[id(plan)] = ArenaLink(
                *(self._servers, rule, plan, self._worker),
                turn=f"{self._turn}.{len(same)}",
                pipelines=bool(self._options.staleness),
                gives_newest=self._gives_newest,
            )
        return found

    @property
    def _gives_newest(self) -> bool:
        """Whether a server that has restarted takes workers' parameters, if they are newer.

        With synchronous updates, all servers have the same number of updates, and so has every
        worker's copy. A single server goes back to its checkpoint together with the rows that are
        done, and loses nothing.
        """
        options = self._options
        has_several = len(self._servers) > 1
        return options.checkpoint is None or (options.update == "sync" and has_several)

    # --- steps ---

    def push(self, links: Sequence[ArenaLink]) -> None:
        """Let the servers update at once."""
        for link in links:
            link.push()
            for table in self.tables.of(link.plan.variables):
                table.push(link.rule, link.count)

    def contribute(self, links: Sequence[ArenaLink], update: int, share: int, of: int) -> None:
        """Send all servers the gradients of a share that a synchronous update takes."""
        for link in links:
            link.contribute(update, share, of)
            for table in self.tables.of(link.plan.variables):
                table.contribute(link.rule, link.count, update, share, of)

    def pull(self) -> None:
        """Take the newest parameters over."""
        for link in self._links.values():
            link.pull()

    # --- between steps ---

    def send_changes(self) -> None:
        """Send what the program has changed between steps; the chief's changes count."""
        if not self._worker.is_chief:
            return
        for link in self._links.values():
            link.send_settings()
            if self.assigned:
                link.assign()
        if self.assigned:
            self.publish()
        self.assigned = False

    def publish(self) -> None:
        """Write the chief's values of variables that steps assign."""
        for state in self._states:
            state.publish()

    def refresh(self, *, slots: bool) -> None:
        """Read the newest values, and the optimizers' slots if asked for."""
        self.send_changes()
        for link in self._links.values():
            link.pull()
            if slots:
                link.pull_slots()
        if not self._worker.is_chief:  # whose own values count
            for state in self._states:
                state.fetch()

    def save(self) -> None:
        """Have the servers write checkpoints; blocks until they are written."""
        for link in self._links.values():
            link.save()
        self.tables.save()
        for state in self._states:
            state.save()
