"""Clusters for tests: servers in this process, or a process for each task."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import allreduce as ar
from allreduce.cluster.spec import ClusterSpec
from tests.harness import ROOT, free_port


def describe(jobs: Mapping[str, int]) -> ClusterSpec:
    """Describe a cluster of so many tasks of each job, on free ports."""
    return ClusterSpec(
        {job: [f"127.0.0.1:{free_port()}" for _ in range(n)] for job, n in jobs.items()}
    )


@contextlib.contextmanager
def serving(**jobs: int) -> Iterator[list[ar.Server]]:
    """Serve all tasks of a cluster in this process, in the order of the spec."""
    spec = describe(jobs)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ar.Server(spec, job, task)) for job, task, _ in spec]


def task_command(job: str, task: int) -> list[str]:
    """Return the command that serves a task, without the cluster."""
    command = [sys.executable, "-m", "allreduce.server", "--job_name", job]
    return [*command, "--task_index", str(task)]


def start_task(spec: ClusterSpec, job: str, task: int) -> subprocess.Popen[str]:
    """Start a task in a process of its own."""
    command = [*task_command(job, task), "--cluster", spec.as_json()]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ALLREDUCE_LOG_LEVEL": "INFO"},
    )


@contextlib.contextmanager
def processes(spec: ClusterSpec) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run each task of a cluster in a process, by its name such as "ps:0"."""
    started = {f"{job}:{task}": start_task(spec, job, task) for job, task, _ in spec}
    try:
        yield started
    finally:
        for each in started.values():
            each.kill()
        for each in started.values():
            each.communicate(timeout=25)


def as_tf_config(spec: ClusterSpec, job: str, task: int) -> str:
    """Describe a task in TensorFlow's form."""
    lists = {name: list(tasks.values()) for name, tasks in spec.as_dict().items()}
    return json.dumps({"cluster": lists, "task": {"type": job, "index": task}})


def launch(
    options: Sequence[str], program: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a program by the launcher, until all of its processes have ended without an error.

    Args:
        options: Those of the launcher.
        program: The program's file.
        arguments: The program's.
    """
    result = subprocess.run(
        [sys.executable, "-m", "allreduce.run", *options, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result
