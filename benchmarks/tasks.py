"""Steps over the tasks of a cluster: a null step, tensors between tasks, and registering a graph.

    python benchmarks/tasks.py            # three tasks as processes of this machine
    python benchmarks/tasks.py --peers    # null steps in turns with TensorFlow's session, too

Prints medians and the 99th percentile. With --peers, TensorFlow gets a virtual environment outside
of the checkout. The bandwidth of tensors is compared with `send` and `recv`
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
from pathlib import Path
from typing import Any

import numpy as np
from measure.environments import DEFAULT_FOLDER, Environments
from trainers import TRAINERS

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


class TensorFlow:
    """Two tasks of TensorFlow and a client of theirs, which times steps on request."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        python = Environments(folder).made("tensorflow", *TRAINERS["tensorflow"].packages)
        with contextlib.ExitStack() as sockets:
            bound = [sockets.enter_context(socket.socket()) for _ in range(2)]
            for each in bound:
                each.bind(("127.0.0.1", 0))
            addresses = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in bound)
        program = str(Path(__file__).parent / "peers" / "tensorflow_tasks.py")
        for task in range(2):
            self._start(stack, [str(python), program, "serve", str(task), addresses])
        self._client = self._start(stack, [str(python), program, "client", addresses])
        self.version = self._answer()["version"]

    def _start(self, stack: contextlib.ExitStack, command: list[str]) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        stack.callback(made.wait)
        stack.callback(made.kill)
        return made

    def _answer(self) -> Any:
        assert self._client.stdout is not None
        return json.loads(self._client.stdout.readline())

    def steps(self, count: int) -> np.ndarray:
        """Time null steps, in microseconds."""
        assert self._client.stdin is not None
        print(count, file=self._client.stdin, flush=True)
        return np.asarray(self._answer())


def beside_tensorflow(session: ar.Session, repeats: int, folder: Path) -> None:
    """Time null steps in turns with TensorFlow's, while the other side sleeps."""
    x = np.zeros(4, np.float32)
    with contextlib.ExitStack() as stack:
        peer = TensorFlow(stack, folder)
        ours, theirs = [], []
        for _ in range(10):
            ours.append(timed(lambda: session.run(null, args=(x,)), 2 * repeats))
            theirs.append(peer.steps(2 * repeats))
        show("a null step, in turns", np.concatenate(ours))
        show(f"TensorFlow {peer.version}'s", np.concatenate(theirs))
        ratio = np.median(np.concatenate(theirs)) / np.median(np.concatenate(ours))
        print(f"{'its median ÷ ours':<44} {ratio:9.1f}")


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
    parser.add_argument("--peers", action="store_true", help="beside TensorFlow")
    parser.add_argument("--environments", type=Path, default=DEFAULT_FOLDER, help="kept in here")
    arguments = parser.parse_args()
    if arguments.as_rank:
        as_rank(arguments.repeats)
        return
    with cluster() as target, ar.Session(target) as session:
        measure(session, arguments.repeats)
        if arguments.peers:
            beside_tensorflow(session, arguments.repeats, arguments.environments)
    transports()


if __name__ == "__main__":
    main()
