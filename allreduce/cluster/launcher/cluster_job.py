"""The tasks of a cluster on this machine: servers for `ps`, the program for the other jobs."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from pathlib import Path

from allreduce.cluster.host.address import LOOPBACK
from allreduce.cluster.launcher.children import NO_LEADER, Child, environment, spawn
from allreduce.cluster.launcher.job import Job
from allreduce.cluster.launcher.output import Relay
from allreduce.cluster.spec import ClusterSpec
from allreduce.errors import UsageError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of outgoing connections
_FIRST_PORT = 10_000
SERVING = ("ps",)  # jobs whose tasks run a server instead of the program


def parse(text: str) -> dict[str, int]:
    """Read the number of tasks of each job: "ps=1,worker=2".

    Raises:
        UsageError: The text has another form, or only jobs that serve.
    """
    jobs: dict[str, int] = {}
    for part in text.split(","):
        job, _, number = part.strip().partition("=")
        if not (job.isidentifier() and number.isdigit() and int(number) > 0) or job in jobs:
            raise UsageError(f"--cluster {text!r}: expected numbers of tasks, as in ps=1,worker=2")
        jobs[job] = int(number)
    if not set(jobs).difference(SERVING):
        raise UsageError(f"--cluster {text!r}: no job runs the program; add worker=1 or more")
    return jobs


class ClusterJob(Job):
    """Runs a cluster until all tasks that run the program have ended.

    Args:
        jobs: The number of tasks of each job.
        command: What each task but those of `ps` executes.
        serving: What those execute.
        grace: Seconds for which tasks may go on after one has failed, or a signal has come.
        restarts: How often a task that fails is started again, over all tasks.
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        command: list[str],
        serving: list[str],
        grace: float,
        restarts: int = 0,
    ) -> None:
        ports = free_ports(sum(jobs.values()))
        spec = {job: [f"{LOOPBACK}:{ports.pop()}" for _ in range(n)] for job, n in jobs.items()}
        self._cluster = ClusterSpec(spec)
        self._tasks = [(job, task) for job, task, _ in self._cluster]
        self._serving, self._restarts = serving, restarts
        super().__init__(command, len(self._tasks), grace)

    def _spawn(self, rank: int) -> Child:
        job, task = self._tasks[rank]
        command = self._serving if job in SERVING else self._command
        name = f"{job}:{task}"
        own = {"CLUSTER": self._cluster.as_json(), "TASK": name, **self._common}
        child = spawn(rank, command, environment(own))
        child.task, child.serves = name, job in SERVING
        return child

    def _host(self) -> bytes:
        return NO_LEADER  # tasks find each other by their addresses

    def _note_end(self, child: Child) -> None:
        if child.failed and self._restarts > 0 and self._stop is None:
            self._finish_output(child)
            self._restart(child)
            return
        culprit = self._culprit
        if child.failed and child.serves and culprit is not None and not culprit.serves:
            # A server closes its connections before its process ends, so workers may end first.
            self._culprit = child
        super()._note_end(child)
        if all(each.code is not None for each in self._children if not each.serves):
            for each in self._children:
                each.end()
            self._end_after(self._grace)

    def _restart(self, child: Child) -> None:
        self._restarts -= 1
        self._tell(f"{child.name} (process {child.pid}) {child.exit_text}; starting it again")
        again = self._children[child.rank] = self._spawn(child.rank)
        for source, sink in ((again.stdout, self._out), (again.stderr, self._err)):
            self._relays[source] = Relay(source, sink, again)
        again.start(NO_LEADER)

    def _aware(self) -> set[int]:
        """Return all tasks: they report to no leader, so any may be saving because of a failure."""
        return {child.rank for child in self._children}

    def _named(self, children: list[Child]) -> str:
        return ", ".join(child.name for child in children)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nothing listens at.

    They are none of those that the kernel gives to outgoing connections: such a connection could
    take one before its task listens there.
    """
    lowest = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else _FIRST_PORT
    candidates = list(range(_FIRST_PORT, lowest))
    random.SystemRandom().shuffle(candidates)
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            made = socket.socket()
            sockets.append(made)
            try:
                made.bind((LOOPBACK, candidates.pop() if candidates else 0))
            except OSError:
                sockets.pop().close()
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
