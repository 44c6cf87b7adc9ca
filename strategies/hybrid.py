"""HybridStrategy: dense variables on the workers with all-reduce, tables on parameter servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path

import numpy as np
from allreduce.strategies.multi_worker import MultiWorkerMirroredStrategy
from allreduce.strategies.server_options import Worker
from allreduce.strategies.server_table import ServerTable, ServerTables

from allreduce import settings
from allreduce.cluster.spec import ClusterSpec
from allreduce.comm import exchange
from allreduce.devices.integers import integer
from allreduce.errors import UnsupportedError
from allreduce.graph.core.host_future import Output
from allreduce.graph.replicate.compiled import Compiled
from allreduce.graph.trace.replica import StepInfo
from allreduce.graph.trace.signature import Arguments
from allreduce.server.client.parameter_client import connect_all

_made = count()  # strategies of this process; programs that are the same make the same ones


class HybridStrategy(MultiWorkerMirroredStrategy):
    """What `ParameterServerStrategy(dense="all_reduce")` makes.

    It is a `MultiWorkerMirroredStrategy` over the cluster's workers, in whose scope embeddings are
    tables on the `ps` tasks. Every step is synchronous, for tables too: a table's update takes the
    rows of all workers.

    Args:
        cluster: The cluster.
        task: This worker, such as "worker:1".
        checkpoint: The servers' folder for checkpoints of tables; None for no checkpoints.
        checkpoint_every: After how many updates they write.
        timeout: Seconds to wait for servers; None for `ALLREDUCE_TIMEOUT`.

    Raises:
        UnsupportedError: This process has several devices.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        task: str,
        *,
        checkpoint: str | PathLike[str] | None = None,
        checkpoint_every: int = 100,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if self.local_replicas > 1:
            raise UnsupportedError(
                'ParameterServerStrategy(dense="all_reduce") has one replica on each worker, but '
                f"{task} has {self.local_replicas} devices; start more workers instead"
            )
        read = settings.load()
        self.name = task
        self.timeout = read.timeout if timeout is None else settings.check("TIMEOUT", timeout)
        folder = None if checkpoint is None else str(Path(checkpoint).absolute())
        every = integer("checkpoint_every", checkpoint_every, 1)
        secret = read.secret or b""
        self._servers = connect_all(cluster, task, secret, self.timeout, checkpoint=folder)
        worker = Worker(task, self.is_chief, self.timeout, folder, every)
        turn = str(next(_made))
        new = partial(ServerTable, self._servers, worker=worker, turn=turn)
        self._tables = ServerTables(new)
        self.make_table = self._tables.make
        # Higher than those of a job that has used the servers before.
        now = np.asarray([time.time_ns() // 1_000_000], np.int64)
        self._update = int(exchange(self.communicator, "the first update", now)[0, 0])

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, whose output and initial values count."""
        return self.communicator.rank == 0

    def _run_compiled(
        self, compiled: Compiled, arguments: Arguments, step_infos: Sequence[StepInfo]
    ) -> Sequence[Sequence[Output]]:
        """Run a step; then add its rows to the tables' update, which takes those of all workers."""
        self._tables.discard()
        results = super()._run_compiled(compiled, arguments, step_infos)
        ranks = self.communicator
        for rule, plan in compiled.updates:
            self._update += 1
            # The sum of all workers' counts, of which each sends its share.
            count = float(plan.arenas[0].count[0]) / ranks.size
            for table in self._tables.of(plan.variables):
                table.contribute(rule, count, self._update, ranks.rank, ranks.size)
                table.after = self._update
        return results

    def close(self) -> None:
        """End the connections to ranks and servers; no more steps can run."""
        super().close()
        for server in self._servers:
            server.close()
