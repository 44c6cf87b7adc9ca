"""Steps over the tasks of a cluster: a null step, tensors between tasks, and registering a graph.

    python benchmarks/tasks.py    # three tasks as processes of this machine

Prints medians and the 99th percentile. The bandwidth of tensors is compared with `send` and `recv`
of a communicator over tcp and shared memory, measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import allreduce as ar

WORKERS = ("/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0")
TENSOR_BYTES = 64 << 20
NODES = 1000


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Start a `ps` and two workers; gives the target of the first worker."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    jobs = {"ps": addresses[:1], "worker": addresses[1:]}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "allreduce.server"],
            env={
                **os.environ,
                "ALLREDUCE_CLUSTER": json.dumps(jobs),
                "ALLREDUCE_TASK": f"{job}:{number}",
            },
        )
        for job in jobs
        for number in range(len(jobs[job]))
    ]
    try:
        yield f"grpc://{addresses[1]}"
    finally:
        for task in tasks:
            task.terminate()
        for task in tasks:
            task.wait(10)


def timed(run: Callable[[], Any], repeats: int) -> np.ndarray:
    """Time calls, in microseconds."""
    times = np.empty(repeats)
    for i in range(repeats):
        began = time.perf_counter()
        run()
        times[i] = (time.perf_counter() - began) * 1e6
    return times


def show(name: str, times: np.ndarray) -> None:
    """Print the median and the 99th percentile."""
    print(f"{name:<44} {np.median(times):9.0f} µs   p99 {np.percentile(times, 99):9.0f} µs")


def show_rate(name: str, seconds: float) -> None:
    """Print the rate at which the tensor moves."""
    print(f"{name:<44} {TENSOR_BYTES / seconds / 1e9:9.2f} GB/s")


def null(x: Any) -> Any:
    """Add a number on each of two tasks."""
    results = []
    for worker in WORKERS:
        with ar.device(worker):
            results.append(x + 1.0)
    return results


def moved(n: Any) -> Any:
    """Make a tensor of 64 MiB on one task, and read its last element on another."""
    with ar.device(WORKERS[0]):
        big = ar.ops.broadcast_to(n, (TENSOR_BYTES // 4,)) + 1.0
    with ar.device(WORKERS[1]):
        return ar.ops.relu(big)[-1:]


def made(n: Any) -> Any:
    """Make the same tensor without moving it."""
    with ar.device(WORKERS[0]):
        big = ar.ops.broadcast_to(n, (TENSOR_BYTES // 4,)) + 1.0
        return ar.ops.relu(big)[-1:]


def long_graph(x: Any) -> Any:
    """Alternate between two tasks for a thousand nodes, in stretches of ten."""
    for i in range(NODES):
        with ar.device(WORKERS[i // 10 % 2]):
            x = ar.ops.tanh(x)
    return x


def measure(session: ar.Session, repeats: int) -> None:
    """Measure all cases in one session."""
    x = np.zeros(4, np.float32)
    n = np.zeros(1, np.float32)
    began = time.perf_counter()
    session.run(long_graph, args=(x,))
    seconds = time.perf_counter() - began
    print(f"{'registering 1,000 nodes, and their first step':<44} {seconds:9.2f} s")
    timed(lambda: session.run(null, args=(x,)), 200)
    show("a null step over two tasks", timed(lambda: session.run(null, args=(x,)), 20 * repeats))
    for fn in (moved, made):
        session.run(fn, args=(n,))
    whole, without = np.empty(repeats), np.empty(repeats)
    for i in range(repeats):  # in turns
        whole[i] = timed(lambda: session.run(moved, args=(n,)), 1)[0]
        without[i] = timed(lambda: session.run(made, args=(n,)), 1)[0]
    show_rate("64 MiB between two tasks", float(np.median(whole - without)) / 1e6)


def transports() -> None:
    """Measure `send` and `recv` of a communicator, for comparison."""
    for name in ("tcp", "shared"):
        subprocess.run(
            [sys.executable, "-m", "allreduce.run", "-n", "2", __file__, "--as-rank"],
            env={**os.environ, "ALLREDUCE_TRANSPORT": name, "ALLREDUCE_LOG_LEVEL": "WARNING"},
            check=True,
        )


def as_rank(repeats: int) -> None:
    """Send the tensor from rank 0 to rank 1."""
    comm = ar.init()
    x = np.ones(TENSOR_BYTES, np.uint8)
    times = np.empty(repeats)
    for i in range(repeats):
        comm.barrier()
        began = time.perf_counter()
        if comm.rank == 0:
            comm.send(x, dest=1)
        else:
            comm.recv(x, source=0)
        times[i] = time.perf_counter() - began
    if comm.rank:
        show_rate(f"64 MiB by send and recv over {comm.transport}", float(np.median(times)))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Steps over the tasks of a cluster.")
    parser.add_argument("--repeats", type=int, default=30, help="of the large tensor's step")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        as_rank(arguments.repeats)
        return
    with cluster() as target, ar.Session(target) as session:
        measure(session, arguments.repeats)
    transports()


if __name__ == "__main__":
    main()
