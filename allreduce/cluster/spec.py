"""The tasks of a cluster: jobs of numbered tasks, each at an address."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from allreduce import settings
from allreduce.cluster.host.launchers import launcher
from allreduce.errors import UsageError

# The jobs of one cluster in the order in which its tasks are counted: TensorFlow's.
_ORDER = ("chief", "master", "worker", "ps", "evaluator")
_LAST_PORT = 65535
_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TASK = re.compile(r"(?:/job:)?([A-Za-z][A-Za-z0-9_]*)(?:/replica:0)?(?:(?:/task)?:([0-9]+))?")


class ClusterSpec:
    """The jobs of a cluster and the addresses of their tasks; immutable.

    Args:
        cluster: A dictionary of lists of `host:port`, by job; or of `host:port` by task number.
            TensorFlow's `TF_CONFIG` form, `{"cluster": {…}, "task": {…}}`, the path of a JSON file
            of either form, JSON text and another ClusterSpec are accepted too.

    Raises:
        UsageError: The description has another form; the message says where it differs.
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Any] | str | os.PathLike[str]) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = cluster._jobs
            return
        found = cluster if isinstance(cluster, Mapping) else _read(cluster)
        jobs = found["cluster"] if isinstance(found.get("cluster"), Mapping) else found
        if not jobs:
            raise UsageError('a cluster needs a job, such as {"worker": ["host:2222"]}, not {}')
        self._jobs = {str(job): _tasks(str(job), tasks) for job, tasks in jobs.items()}
        addresses = [address for _, _, address in self]
        twice = sorted({each for each in addresses if addresses.count(each) > 1})
        if twice:
            raise UsageError(f"two tasks of the cluster have the address {twice[0]!r}")

    def __iter__(self) -> Iterator[tuple[str, int, str]]:
        """Iterate over job, task number and address of all tasks."""
        for job in self.jobs:
            for task, address in sorted(self._jobs[job].items()):
                yield job, task, address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    def __hash__(self) -> int:
        return hash(self.as_json())

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs: chief, worker, ps, evaluator, then others."""
        known = [job for job in _ORDER if job in self._jobs]
        return [*known, *sorted(set(self._jobs).difference(known))]

    def num_tasks(self, job: str) -> int:
        """Return the number of tasks of a job; 0 if there is no such job."""
        return len(self._jobs.get(job, ()))

    def address(self, job: str, task: int) -> str:
        """Return the `host:port` of a task.

        Raises:
            UsageError: There is no such task; the message lists the tasks.
        """
        try:
            return self._jobs[job][task]
        except KeyError:
            there = ", ".join(f"/job:{job}/task:{task}" for job, task, _ in self)
            raise UsageError(
                f"the cluster has no task /job:{job}/task:{task}; it has {there}"
            ) from None

    def as_dict(self) -> dict[str, dict[int, str]]:
        """Return the addresses by job and task number."""
        return {job: dict(sorted(self._jobs[job].items())) for job in self.jobs}

    def as_json(self) -> str:
        """Return the addresses as JSON, equal for equal clusters."""
        return json.dumps(self.as_dict(), sort_keys=True)


def own_task(environ: Mapping[str, str] | None = None) -> tuple[ClusterSpec, str, int] | None:
    """Return the cluster and this process's task that the environment describes, or None.

    `ALLREDUCE_CLUSTER` and `ALLREDUCE_TASK` win over `TF_CONFIG`.

    Raises:
        UsageError: One of them has another form, or names a task that the cluster lacks.
    """
    environ = os.environ if environ is None else environ
    read = settings.load(environ)
    if read.cluster is not None:
        spec = ClusterSpec(read.cluster)
        job, task = _by_rank(spec, environ) if read.task is None else parse_task(read.task)
    elif environ.get("TF_CONFIG"):
        found = _read(environ["TF_CONFIG"])
        if not isinstance(found.get("task"), Mapping):
            raise UsageError('TF_CONFIG has no "task", such as {"type": "worker", "index": 0}')
        spec = ClusterSpec(found)
        index = found["task"].get("index", 0)
        if not str(index).isdecimal():
            raise UsageError(f"TF_CONFIG has the task index {index!r}; expected a number such as 0")
        job, task = str(found["task"].get("type")), int(index)
    else:
        return None
    spec.address(job, task)
    return spec, job, task


def _by_rank(spec: ClusterSpec, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the task of an MPI rank: ranks are the cluster's tasks in their order.

    Raises:
        UsageError: No MPI launcher has started this process, or it started more ranks than tasks.
    """
    started = launcher(environ)
    tasks = [(job, task) for job, task, _ in spec]
    if started is None:
        raise UsageError(
            "ALLREDUCE_CLUSTER is set without ALLREDUCE_TASK; set it to this process's task, "
            "such as worker:0"
        )
    if started.size != len(tasks):
        raise UsageError(
            f"{started}, but ALLREDUCE_CLUSTER has {len(tasks)} tasks; start as many ranks, or set "
            "ALLREDUCE_TASK on each"
        )
    return tasks[started.rank]


def collective_tasks(spec: ClusterSpec) -> list[tuple[str, int]]:
    """List the tasks that make collective calls together, by rank: chief, then workers."""
    return [(job, task) for job, task, _ in spec if job in ("chief", "master", "worker")]


def parse_task(text: str) -> tuple[str, int]:
    """Read a task's name: "worker:1" or "/job:worker/task:1"; returns its job and number.

    Raises:
        UsageError: It has another form.
    """
    found = _TASK.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise UsageError(f"{text!r} names no task; expected a name such as 'worker:1'")
    return found[1], int(found[2] or 0)


def is_address(given: object) -> bool:
    """Return whether something has the form `host:port`."""
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    return bool(host) and port.isdecimal() and int(port) <= _LAST_PORT


def _read(given: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read JSON text, or a file of it."""
    if not isinstance(given, str | os.PathLike):
        raise UsageError(
            f"a cluster is {given!r:.60}; expected a dictionary of jobs, or JSON or a file of it"
        )
    text = os.fspath(given)
    where = "the cluster's description"
    if not text.lstrip().startswith("{"):
        where = f"the cluster file {text!r}"
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise UsageError(f"{where} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{where} is not text: {error}; expected JSON") from error
        except ValueError as error:  # no path can have this name
            raise UsageError(f"{where} cannot be read: {error}") from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"{where} is {type(found).__name__}; expected an object of jobs")
    return found


def _tasks(job: str, given: Any) -> dict[int, str]:
    """Check the tasks of one job; returns their addresses by number."""
    if isinstance(given, Mapping):
        strange = [number for number in given if not str(number).isdecimal()]
        if strange:
            raise UsageError(
                f"job {job!r} of the cluster has a task {strange[0]!r}; expected a number such as 0"
            )
        tasks = {int(number): address for number, address in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        tasks = dict(enumerate(given))
    else:
        raise UsageError(f"job {job!r} of the cluster is {given!r}; expected a list of host:port")
    if not _JOB.fullmatch(job):
        raise UsageError(f"the cluster has a job {job!r}; expected a word such as 'worker'")
    if not tasks:
        raise UsageError(f"job {job!r} of the cluster has no tasks; give it one, or leave it out")
    for number, address in tasks.items():
        if not is_address(address):
            raise UsageError(
                f"task {number} of job {job!r} has the address {address!r}; expected host:port"
            )
    return tasks
