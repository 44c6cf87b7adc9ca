"""Parameter servers: samples per second, push and pull, tables.

    python benchmarks/parameter_server.py            # alone
    python benchmarks/parameter_server.py --peers    # in turns with TensorFlow

1. An MLP 784-1024-1024-10, batch 128, one server and two workers of one thread each, asynchronous
   and synchronous; with --peers beside TensorFlow's ParameterServerStrategy and ClusterCoordinator,
   which gets a virtual environment outside of the checkout.
2. Push and pull of 20 M parameters with Adam, as a share of the bandwidth of memory. Counted on
   paper: the worker's copies of gradients and parameters (2 times read and write), Adam's pass (4
   reads, 3 writes), and the server's copy of the parameters (read and write), 13 words a parameter.
3. A table of 10 M x 16 on two servers, batches of 4,096 x 26 numbers: rows looked up and updated
   per second, and bytes per step beside the count on paper.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure.environments import DEFAULT_FOLDER, Environments
from trainers import TRAINERS

ROOT = Path(__file__).resolve().parent.parent
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
BATCH, SIZES = 128, (784, 1024, 1024, 10)


def launch(cluster: str, *arguments: str) -> dict[str, Any]:
    """Run this file's worker on a cluster; returns what the chief has printed as JSON."""
    command = [sys.executable, "-m", "allreduce.run", "--cluster", cluster, __file__, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, **THREADS}
    )
    for line in result.stdout.splitlines():
        start = line.find("{")
        if start >= 0:
            found: dict[str, Any] = json.loads(line[start:])
            return found
    raise SystemExit(result.stdout + result.stderr)


# --- workers ---


def train(update: str, steps: int) -> None:
    """Print samples per second over all workers."""
    import allreduce as ar

    ar.config.threading.set_intra_op_parallelism_threads(1)
    ar.set_seed(0)
    strategy = ar.ParameterServerStrategy(update=update)  # type: ignore[arg-type]
    with strategy.scope():
        layers = [ar.nn.Dense(n, activation="relu") for n in SIZES[1:-1]]
        model = ar.nn.Sequential([*layers, ar.nn.Dense(SIZES[-1], activation="softmax")])
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    random = np.random.default_rng(0)
    x = random.standard_normal((BATCH * steps, SIZES[0])).astype(np.float32)
    y = random.integers(0, SIZES[-1], len(x)).astype(np.int32)
    size = BATCH * (2 if update == "sync" else 1)  # of both workers together, if synchronous
    model.fit(x, y, batch_size=size, epochs=1, verbose=0)  # compiles
    start = time.perf_counter()
    model.fit(x, y, batch_size=size, epochs=1, verbose=0)
    if strategy.is_chief:
        print(json.dumps({"samples_per_second": len(x) / (time.perf_counter() - start)}))


def push(count: int, steps: int) -> None:
    """Print the bandwidth of pushes and pulls, and of copies of memory, in bytes per second."""
    import allreduce as ar

    strategy = ar.ParameterServerStrategy()
    with strategy.scope():
        weights = ar.Variable(np.zeros(count, np.float32), name="weights")
        optimizer = ar.optim.Adam()

    @ar.function
    def step(x: Any) -> Any:
        optimizer.apply([weights * x], [weights])
        return x

    def seconds() -> float:
        start = time.perf_counter()
        link.push()
        return time.perf_counter() - start

    strategy.run(step, (np.float32(0.0),))
    (link,) = strategy._variables._links.values()
    best = statistics.median(seconds() for _ in range(steps))
    source, target = np.zeros(count, np.float32), np.zeros(count, np.float32)
    copies = []
    for _ in range(steps):
        start = time.perf_counter()
        target[...] = source
        copies.append(time.perf_counter() - start)
    memory = 2 * 4 * count / statistics.median(copies)
    moved = 13 * 4 * count / best
    found = {"seconds": best, "bytes_per_second": moved, "memory": memory}
    print(json.dumps({**found, "share": moved / memory}))


def table(rows: int, steps: int) -> None:
    """Print rows looked up and updated per second, and bytes per step."""
    import allreduce as ar

    strategy = ar.ParameterServerStrategy()
    with strategy.scope():
        embedding = ar.nn.Embedding(rows, 16, embeddings_initializer="zeros")
        optimizer = ar.optim.Adagrad()
    random = np.random.default_rng(strategy.task_index)
    batches = [random.integers(0, rows, (4096, 26)) for _ in range(4)]

    @ar.function
    def step(numbers: Any) -> Any:
        found = embedding(numbers)
        optimizer.minimize(ar.ops.mean(found, axis=(1, 2)), [embedding.anchor])
        return ar.ops.mean(found)

    def times(run: Any) -> float:
        run(batches[0])
        start = time.perf_counter()
        for number in range(steps):
            run(batches[number % len(batches)])
        return (time.perf_counter() - start) / steps

    numbers = batches[0].size
    looked = times(lambda batch: strategy.run(ar.function(embedding), (batch,)))
    before = sum(server.nbytes for server in strategy._servers)
    updated = times(lambda batch: strategy.run(step, (batch,)))
    moved = (sum(server.nbytes for server in strategy._servers) - before) / (steps + 1)
    different = statistics.mean(len(np.unique(each)) for each in batches)
    if strategy.is_chief:
        paper = different * (4 + 64) * 2  # numbers and rows, there and back
        found = {"lookups_per_second": numbers / looked, "updates_per_second": numbers / updated}
        print(json.dumps({**found, "bytes": moved, "bytes_on_paper": paper}))


# --- the benchmark ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", nargs=3, help="what, and its two arguments (internal)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="measure TensorFlow, too")
    parser.add_argument("--environments", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    options = parser.parse_args()
    if options.worker:
        what, first, steps = options.worker
        workers = {"train": train, "push": push, "table": table}
        workers[what](first if what == "train" else int(first), int(steps))  # type: ignore[operator]
        return
    steps, count, rows = (
        (20, 1_000_000, 100_000) if options.quick else (200, 20_000_000, 10_000_000)
    )
    python = None
    if options.peers:
        packages = TRAINERS["tensorflow"].packages
        python = Environments(options.environments).made("tensorflow", *packages)
    for _ in range(options.rounds):
        for update in ("async", "sync"):
            found = launch("ps=1,worker=2", "--worker", "train", update, str(steps))
            print(f"MLP {update}: {found['samples_per_second']:,.0f} samples/s")
        if python is not None:
            print(f"MLP TensorFlow: {tensorflow(python, steps):,.0f} samples/s")
        found = launch("ps=1,worker=1", "--worker", "push", str(count), "10")
        print(
            f"push and pull of {count:,}: {found['seconds'] * 1e3:.1f} ms, "
            f"{found['bytes_per_second'] / 1e9:.1f} GB/s, {found['share']:.0%} of memory's"
        )
        found = launch("ps=2,worker=1", "--worker", "table", str(rows), str(max(steps // 10, 2)))
        print(
            f"table of {rows:,} x 16: {found['lookups_per_second']:,.0f} lookups/s, "
            f"{found['updates_per_second']:,.0f} lookups with updates/s, "
            f"{found['bytes'] / found['bytes_on_paper']:.3f} times the bytes on paper"
        )


def tensorflow(python: Path, steps: int) -> float:
    """Run the same training with TensorFlow; returns its samples per second."""
    from allreduce.cluster.launcher.cluster_job import free_ports

    ports = iter(free_ports(4))
    jobs = {"chief": 1, "ps": 1, "worker": 2}
    cluster = {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in jobs.items()}
    program = ROOT / "benchmarks" / "peers" / "tensorflow_parameter_server.py"
    given = json.dumps([SIZES, BATCH, steps])
    started: list[subprocess.Popen[str]] = []
    try:
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1), ("chief", 0)):
            task = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            started.append(
                subprocess.Popen(
                    [str(python), str(program), given],
                    stdout=subprocess.PIPE if job == "chief" else subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, **THREADS, "TF_CONFIG": task, "TF_CPP_MIN_LOG_LEVEL": "3"},
                )
            )
        out, _ = started[-1].communicate(timeout=300)
    finally:
        for each in started:
            each.kill()
            each.wait()
    return float(out.rpartition("SAMPLES ")[2].split()[0])


if __name__ == "__main__":
    main()
