"""Place variables on the tasks of a job, for programs that share them by name."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from allreduce.cluster.spec import ClusterSpec, own_task
from allreduce.errors import UsageError
from allreduce.graph.core.node import Node

_STRATEGIES = ("round_robin", "bytes")


def device_setter(
    cluster: Any = None,
    *,
    ps_job: str = "ps",
    worker_device: str | None = None,
    strategy: str = "round_robin",
) -> Callable[[Node], str | None]:
    """Return a function for `ar.device` that distributes variables over the tasks of a job.

    Programs that make the same variables in the same order place them alike.

    Args:
        cluster: The cluster, in any form that `ClusterSpec` accepts; by default as the environment
            describes it.
        ps_job: The job whose tasks hold variables.
        worker_device: The device of all other operators; None leaves it open.
        strategy: "round_robin", or "bytes": each variable goes to the task with the fewest bytes
            so far.

    Raises:
        UsageError: There is no cluster, no such job in it, or no such strategy.
    """
    if strategy not in _STRATEGIES:
        raise UsageError(f"unknown strategy {strategy!r}: there are {', '.join(_STRATEGIES)}")
    if cluster is None:
        found = own_task()
        if found is None:
            raise UsageError("device_setter needs a cluster; none is in the environment")
        cluster = found[0]
    tasks = [task for job, task, _ in ClusterSpec(cluster) if job == ps_job]
    if not tasks:
        raise UsageError(f"the cluster has no job {ps_job!r} that could hold variables")
    loads = dict.fromkeys(tasks, 0)

    def choose(node: Node) -> str | None:
        if node.op != "variable":
            return worker_device
        task = min(tasks, key=lambda each: (loads[each], each))
        size = prod(int(each) for each in node.spec.shape) * node.spec.dtype.itemsize
        loads[task] += size if strategy == "bytes" else 1
        return f"/job:{ps_job}/task:{task}"

    return choose
