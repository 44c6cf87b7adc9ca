"""ParameterServerStrategy: variables on `ps` tasks, one replica on each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import count
from os import PathLike
from typing import Any, Literal
from zlib import crc32

import numpy as np
from allreduce.strategies.arena_link import ArenaLink
from allreduce.strategies.base import Strategy
from allreduce.strategies.fit_client import FitClient, late
from allreduce.strategies.hybrid import HybridStrategy
from allreduce.strategies.server_options import ServerOptions, Worker, find_workers
from allreduce.strategies.server_state import is_state
from allreduce.strategies.server_variables import ServerVariables

from allreduce import settings
from allreduce.cluster.host.address import split
from allreduce.cluster.host.waiting import Wait
from allreduce.devices import logical_devices
from allreduce.devices.options import start_logging
from allreduce.errors import UnsupportedError, UsageError
from allreduce.events import logger
from allreduce.graph import device
from allreduce.graph.core import seed
from allreduce.graph.core.host_future import Output
from allreduce.graph.replicate.compiled import Compiled
from allreduce.graph.trace.replica import Replica, StepInfo
from allreduce.graph.trace.signature import Arguments
from allreduce.graph.trace.variable import Variable
from allreduce.parameters.dealing import Answer
from allreduce.parameters.row_ranges import FitSpec
from allreduce.server.client.parameter_client import ParameterServer, connect_all
from allreduce.training.dealt_fit import Report

_made = count()  # strategies of this process; programs that are the same make the same ones


class ParameterServerStrategy(Strategy):
    """Trains one replica per worker, on its CPU; `ps` tasks hold variables and run the optimizer.

    All workers run the same program. The chief (worker 0, or the task `chief`) gives variables
    their initial values. `fit` deals out the rows among the workers that live; `evaluate`,
    `predict`, `reduce` and `gather` are each worker's own.

    Args:
        cluster: The cluster, in any form that `ClusterSpec` accepts; by default, and always for
            this process's task, the environment's (`ALLREDUCE_CLUSTER` and `ALLREDUCE_TASK`, or
            `TF_CONFIG`).
        update: "async": the servers update with each worker's gradients when they come. "sync": an
            update takes the gradients of several workers, all computed with the newest parameters.
        dense: With "all_reduce", only tables (`ar.nn.Embedding`) are on the servers; dense
            variables are on the workers, as with MultiWorkerMirroredStrategy. Steps are
            synchronous, and the strategy is a `HybridStrategy`.
        replicas_to_aggregate: How many gradients a synchronous update takes, which is also the
            number of parts of a global batch; by default the number of workers.
        total_replicas: How many gradients are computed at a time; those above
            `replicas_to_aggregate` are of backup workers, so that slow ones hold nobody up. If
            there are fewer workers, each computes one after the other. By default
            `replicas_to_aggregate`.
        staleness: How many steps a worker may be ahead of the slowest one, with asynchronous
            updates; it then waits. From 1 on, a step does not wait for the answer to the gradients
            of the step before. None for any number, without such overlap.
        checkpoint: A folder in which servers write their parameters and slots, and from which they
            read them when they start, also if their number is another one. Each server must reach
            it.
        checkpoint_every: After how many updates they write.
        timeout: Seconds to wait for servers that are not up, or lost, and for other workers; by
            default `ALLREDUCE_TIMEOUT`, or 300.

    Raises:
        UsageError: This process is no worker of a cluster with `ps` tasks, an argument makes no
            sense, or a server cannot write checkpoints.
        MismatchError: Another worker has other arguments.
        TimeoutError: A server does not answer in time.
    """

    deals_rows = True

    def __new__(
        cls, cluster: Any = None, *, dense: str = "parameter_server", **options: Any
    ) -> Any:
        """Make the strategy, or with `dense="all_reduce"` a `HybridStrategy`."""
        if dense not in ("parameter_server", "all_reduce"):
            raise UsageError(f'dense is "parameter_server" or "all_reduce", not {dense!r}')
        if dense == "parameter_server":
            return super().__new__(cls)
        known = ("checkpoint", "checkpoint_every", "timeout")
        wrong = sorted(set(options).difference(known))
        if wrong:
            raise UsageError(
                f'ParameterServerStrategy(dense="all_reduce") takes no {wrong[0]}: its steps are '
                f"those of MultiWorkerMirroredStrategy; it takes {', '.join(known)}"
            )
        spec, (job, number), _ = find_workers(cluster)
        return HybridStrategy(spec, f"{job}:{number}", **options)

    def __init__(
        self,
        cluster: Any = None,
        *,
        dense: Literal["parameter_server"] = "parameter_server",  # noqa: ARG002  # for `__new__`
        update: Literal["async", "sync"] = "async",
        replicas_to_aggregate: int | None = None,
        total_replicas: int | None = None,
        staleness: int | None = None,
        checkpoint: str | PathLike[str] | None = None,
        checkpoint_every: int = 100,
        timeout: float | None = None,
    ) -> None:
        start_logging()
        self.cluster, self._task, self._tasks = find_workers(cluster)
        devices = [logical_devices("CPU")[0].name]
        on_host = sum(self._host(each) == self._host(self._task) for each in self._tasks)
        super().__init__([devices], 0, 1, here=(on_host, 0))
        self.task_index = self._tasks.index(self._task)
        self.is_chief = self.task_index == 0
        self.name = f"{self._task[0]}:{self._task[1]}"
        self._options = ServerOptions.of(
            *(len(self._tasks), update, replicas_to_aggregate, total_replicas, staleness),
            *(checkpoint, checkpoint_every),
        )
        self._is_sync = self._options.update == "sync"
        read = settings.load()
        self.timeout = read.timeout if timeout is None else settings.check("TIMEOUT", timeout)
        self._placing: Callable[..., Any] | None = None
        self._number = next(_made)
        # The latest update that a loop of the program's own has given to, and how many gradients.
        self._contributed, self._given = -1, 0
        self._update = -1  # the synchronous update whose parameters are here
        secret = read.secret or b""
        self._servers = connect_all(
            *(self.cluster, self.name, secret, self.timeout, self._join),
            checkpoint=self._options.checkpoint,
        )
        self._worker = Worker(
            *(self.name, self.is_chief, self.timeout),
            *(self._options.checkpoint, self._options.checkpoint_every),
        )
        self._variables = ServerVariables(self._servers, self._options, self._worker, self._number)
        self.make_table = self._variables.tables.make
        self._fit = FitClient(
            *(self._servers[0], self._worker),
            workers=len(self._tasks),
            is_sync=self._is_sync,
            strategy=self._number,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__} on {self.name}"

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make layers, variables and optimizers for this strategy.

        They are replicas of this worker; with a `ClusterCoordinator`, variables are on `ps` tasks.
        """
        with super().scope(), device(self._placing) if self._placing else nullcontext():
            yield self

    def place_variables(self, placing: Callable[..., Any]) -> None:
        """Have `scope` place variables on tasks, as `ClusterCoordinator` needs it."""
        self._placing = placing

    def _host(self, task: tuple[str, int]) -> str:
        return split(self.cluster.address(*task))[0]

    @property
    def communicator(self) -> Any:
        """None: workers do not communicate with each other."""
        return None

    @property
    def replicas(self) -> list[Replica]:
        """The replica of this worker; its id is the worker's number."""
        with self._making:
            if self._replicas is None:
                place = self.places[0]
                self._replicas = [Replica(0, self.task_index, None, place, updates_remotely=True)]
            return self._replicas

    def _join(self, server: ParameterServer) -> None:
        """Introduce this worker to the first server, after each new connection."""
        fields = {
            "task": self.name,
            "is_chief": self.is_chief,
            "settings": asdict(self._options),
            "cluster": f"{crc32(self.cluster.as_json().encode()):08x}",
            "seed": seed.chosen(),
            "seed_is_set": seed.is_set(),
        }
        reply, _ = server.call("join", fields)
        if not seed.is_set():
            seed.adopt(reply["seed"])

    # --- steps ---

    def _run_compiled(
        self, compiled: Compiled, arguments: Arguments, step_infos: Sequence[StepInfo]
    ) -> Sequence[Sequence[Output]]:
        """Run a step with the servers' parameters; then send its gradients to them."""
        links = self._variables.prepare(compiled)
        self._variables.send_changes()
        if not links:
            self.refresh(slots=False)
        elif (share := self._fit.share) is not None:
            if self._update != share["update"]:
                self._pull(share["update"])
        elif self._is_sync:
            self._await_update()
        self._variables.tables.discard()  # what a step has left that was not taken
        results = super()._run_compiled(compiled, arguments, step_infos)
        completed = [each for each in links if each.plan.arenas[0].completes]
        if not self._is_sync:
            self._push(completed)
        elif completed:
            self._contribute(completed)
        return results

    def _run_eagerly(self, *_: Any) -> Any:
        raise UnsupportedError(
            "with ParameterServerStrategy, servers update after a step that was traced; turn "
            "run_eagerly and ar.config.run_functions_eagerly off"
        )

    def _push(self, links: Sequence[ArenaLink]) -> None:
        """Send gradients; wait if this worker is too far ahead of others."""
        most, first = self._options.staleness, self._servers[0]
        if most is None or not links:
            self._variables.push(links)
            return
        fields = {"most": most, "again": False}
        tick = first.start("tick", fields)
        self._variables.push(links)
        wait = Wait(self.timeout)
        reply, _ = first.finish(tick)
        while reply["ahead"]:
            if not wait.has_time_left(f"workers that are more than {most} steps behind"):
                raise late(first, self._worker)
            reply, _ = first.call("tick", {**fields, "again": True})

    def _contribute(self, links: Sequence[ArenaLink]) -> None:
        """Add gradients to the synchronous update under way, or drop them if they are late."""
        share, first = self._fit.share, self._servers[0]
        if share is None:  # a loop of the program's own
            offered, _ = first.call("offer", {"update": self._update})
            self._given = self._given + 1 if self._contributed == self._update else 1
            self._contributed = self._update
            if offered.get("taken"):
                self._variables.contribute(links, self._update, offered["share"], offered["of"])
                first.call("deliver", {"share": offered["share"]})
            return
        if self._fit.claim():
            self._variables.contribute(links, share["update"], share["part"], share["of"])

    def _await_update(self) -> None:
        """Wait until this worker may give to an update, and take its parameters.

        If an update takes more gradients than there are workers, each gives several to it.
        """
        wait = Wait(self.timeout)
        fields = {"update": self._contributed, "given": self._given}
        while True:
            reply, _ = self._servers[0].call("newest", fields)
            if not reply["wait"]:
                break
            if not wait.has_time_left("the gradients of other workers"):
                raise late(self._servers[0], self._worker)
        if reply["update"] != self._update:
            self._pull(reply["update"])

    def _pull(self, update: int) -> None:
        self._variables.pull()
        self._update = update

    def note_assignment(self, variable: Variable, value: np.ndarray) -> None:
        """Record an assignment between steps, before it is made."""
        super().note_assignment(variable, value)
        self._variables.assigned = True

    def refresh(self, *, slots: bool) -> None:
        """Read the newest parameters, and the optimizers' slots if asked for."""
        self._variables.refresh(slots=slots)

    # --- fit ---

    @property
    def default_batches(self) -> int:
        """The number of replicas that share a global batch."""
        return self._options.replicas_to_aggregate if self._is_sync else 1

    def begin_fit(self, spec: FitSpec) -> None:
        """Begin a call of `fit`; see `training.dealt_fit.Dealer`."""
        if self._is_sync and spec.micro_batches > 1:
            raise UnsupportedError(
                "gradient_accumulation with synchronous parameter servers: a larger batch_size "
                "does the same, as an update takes gradients of several workers anyway"
            )
        self._variables.send_changes()
        self._fit.begin(spec)

    def register(self, step: Callable[..., Any], batch: Sequence[Any]) -> None:
        """Exchange the values of a step's variables; see `training.dealt_fit.Dealer`."""
        fn, arguments = self._together(step, batch, None)

        def exchange() -> None:
            self._variables.register(self._compiled(self._programs.of(fn), fn, arguments))

        self.between_steps(exchange)
        self.refresh(slots=False)

    def ask(self, seen: int, stops: bool, done: Report | None) -> Answer:
        """Report a part, and ask what to do next; see `training.dealt_fit.Dealer`."""
        self._variables.send_changes()
        if done is not None:
            self._variables.publish()
        return self._fit.ask(seen, stops, done)

    def status(self) -> dict[str, Any]:
        """Return what the servers have counted.

        Returns:
            "workers": the names of those that live; "updates": the number of updates of each
            server; "staleness": how many gradients were so many updates old (100 stands for more,
            too); "dropped": the number of gradients that came too late for a synchronous update.
        """
        found: dict[str, Any] = {"updates": {}, "staleness": {}, "dropped": 0}
        for server in self._servers:
            each, _ = server.call("status", {})
            if server is self._servers[0]:
                found["workers"], found["dropped"] = each["workers"], each["dropped"]
            stores = [store for key, store in each["stores"].items() if not is_state(key)]
            found["updates"][server.name] = max((s["updates"] for s in stores), default=0)
            for age, times in (pair for store in stores for pair in store["staleness"]):
                found["staleness"][age] = found["staleness"].get(age, 0) + times
        return found

    def end_fit(self) -> None:
        """Read the values of the end; the chief reports what the servers have counted."""
        self._fit.end()
        self.refresh(slots=self.is_chief)
        if not self.is_chief:
            return
        self._variables.save()
        found = self.status()
        ages = found["staleness"]
        if self._is_sync:
            logger.info(
                "[parameter server] %d updates; %d gradients came too late and were dropped",
                *(max(found["updates"].values()), found["dropped"]),
            )
        elif ages:
            mean = sum(age * count for age, count in ages.items()) / sum(ages.values())
            logger.info(
                "[parameter server] %d updates; gradients were %.2f updates old on average, "
                "%d at most",
                *(max(found["updates"].values()), mean, max(ages)),
            )

    def was_taken(self) -> bool:
        """Return whether the latest part's gradients were used."""
        return self._fit.taken

    def close(self) -> None:
        """End the connections to the servers; no more steps can run."""
        super().close()
        for server in self._servers:
            server.close()
