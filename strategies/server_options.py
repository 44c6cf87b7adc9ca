"""The options of ParameterServerStrategy, checked, and its place in the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.cluster.host.waiting import Wait
from allreduce.cluster.spec import ClusterSpec, own_task
from allreduce.devices.integers import integer
from allreduce.errors import TimeoutError, UsageError
from allreduce.server.client.parameter_client import WORKERS, ParameterServer


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of `ParameterServerStrategy`, which documents them; all workers have the same."""

    update: str
    replicas_to_aggregate: int
    total_replicas: int
    staleness: int | None
    checkpoint: str | None
    checkpoint_every: int

    @classmethod
    def of(
        cls,
        workers: int,
        update: Any,
        size: int | None,
        total: int | None,
        staleness: int | None,
        checkpoint: str | PathLike[str] | None,
        every: int,
    ) -> ServerOptions:
        """Check the strategy's arguments, and complete them.

        Raises:
            UsageError: One makes no sense, or not with the others.
        """
        if update not in ("async", "sync"):
            raise UsageError(f'update is "async" or "sync", not {update!r}')
        if update == "async" and (size is not None or total is not None):
            raise UsageError('replicas_to_aggregate and total_replicas are for update="sync"')
        if update == "sync" and staleness is not None:
            raise UsageError("staleness is for asynchronous updates; synchronous ones have none")
        size = integer("replicas_to_aggregate", workers if size is None else size, 1)
        total = integer("total_replicas", size if total is None else total, 1)
        if total < size:
            raise UsageError(
                f"an update takes replicas_to_aggregate={size} gradients, but only total_replicas="
                f"{total} are computed at a time; total_replicas is at least replicas_to_aggregate"
            )
        if checkpoint is not None and not isinstance(checkpoint, str | PathLike):
            raise UsageError(f"checkpoint is a folder's path, not {checkpoint!r}")
        return cls(
            update,
            size,
            total,
            None if staleness is None else integer("staleness", staleness, 0),
            None if checkpoint is None else str(Path(checkpoint).absolute()),
            integer("checkpoint_every", every, 1),
        )


@dataclass(frozen=True, slots=True)
class Worker:
    """This worker, which registers arenas, tables and assigned variables with servers.

    Attributes:
        task: Its name, such as "worker:1".
        is_chief: Whether its initial and assigned values count.
        timeout: Seconds to wait for the chief and other workers.
        checkpoint: The servers' folder for checkpoints; None for no checkpoints.
        checkpoint_every: After how many updates they write one.
    """

    task: str
    is_chief: bool
    timeout: float
    checkpoint: str | None
    checkpoint_every: int

    def register(
        self,
        server: ParameterServer,
        method: str,
        fields: Mapping[str, Any],
        what: str,
        values: Sequence[np.ndarray] = (),
        fill: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Make a store on a server, or find it; wait until it has values.

        Args:
            server: The server.
            method: The method to call.
            fields: Its arguments besides those that all have.
            what: The variables, for messages.
            values: Their initial values, if this worker gives them at once.
            fill: Gives them otherwise.

        Returns:
            The server's reply.
        """
        own = {**fields, "task": self.task, "server": server.name}
        own |= {"checkpoint": self.checkpoint, "checkpoint_every": self.checkpoint_every}
        wait = Wait(self.timeout)
        while not (reply := server.call(method, own, values)[0])["ready"]:
            if fill is not None and reply["fill"]:
                fill()
            elif not wait.has_time_left(f"the chief to initialise {what} on {server.name}"):
                raise TimeoutError(
                    f"[parameter server] {self.task}: the chief has not initialised {what} on "
                    f"{server.name} within {self.timeout:g} s; is worker 0 running, and does it "
                    "make the same model with the same optimizer?"
                )
        return reply


def find_workers(cluster: Any) -> tuple[ClusterSpec, tuple[str, int], list[tuple[str, int]]]:
    """Return the cluster, this process's task, and the tasks of all workers, the chief first.

    Raises:
        UsageError: This process is no worker of a cluster with `ps` tasks.
    """
    found = own_task()
    if found is None:
        raise UsageError(
            "ParameterServerStrategy: the environment does not name this process's task in a "
            "cluster with ps tasks, nor does the argument `cluster`; start the program with "
            "`python -m allreduce.run --cluster ps=1,worker=2`, or set ALLREDUCE_CLUSTER to the "
            "cluster and ALLREDUCE_TASK to the task, such as worker:0"
        )
    spec, job, number = found
    spec = spec if cluster is None else ClusterSpec(cluster)
    tasks = [(j, n) for j, n, _ in spec if j in WORKERS]
    if not spec.num_tasks("ps"):
        raise UsageError(
            f"ParameterServerStrategy: the cluster has no ps task, only {', '.join(spec.jobs)}; "
            "add one, as in --cluster ps=1,worker=2"
        )
    if not tasks:
        raise UsageError(
            f"ParameterServerStrategy: the cluster has no job worker or chief, only "
            f"{', '.join(spec.jobs)}; jobs that train are called so, as in --cluster ps=1,worker=2"
        )
    if (job, number) not in tasks:
        raise UsageError(
            f"ParameterServerStrategy on {job}:{number}: it is for workers; a ps task runs `python "
            "-m allreduce.server`"
        )
    return spec, (job, number), tasks
