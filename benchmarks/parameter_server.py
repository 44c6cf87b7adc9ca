"""Parameter servers: samples per second, push and pull, tables.

    python benchmarks/parameter_server.py            # alone
    python benchmarks/parameter_server.py --peers    # in turns with TensorFlow

1. An MLP 784-1024-1024-10, batch 128, one server and two workers of one thread each, asynchronous
   and synchronous; with --peers beside TensorFlow's ParameterServerStrategy and ClusterCoordinator,
   which gets a virtual environment outside of the checkout.
2. Push and pull of 20 M parameters with Adam, as a share of the bandwidth of memory. Counted on
   paper: the worker's copies of gradients and parameters (2 times read and write), Adam's pass (4
   reads, 3 writes), and the server's copy of the parameters (read and write), 13 words a parameter.
3. A table of 10 M x 16 on two servers, batches of 4,096 x 26 numbers, one worker, Adagrad: rows
   looked up and updated per second, and bytes per step beside the count on paper; with --peers
   beside TensorFlow's, four steps to a call. The rows of all are compared with NumPy's.
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
SHAPE, BATCHES = (4096, 26), 4  # of numbers of rows, which repeat
RATE, ACCUMULATOR = 0.1, 1e-6  # of Adagrad; gradients matter to its sums


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
    """Print rows looked up and updated per second, bytes per step, and the mean of some rows."""
    import allreduce as ar

    strategy = ar.ParameterServerStrategy()
    with strategy.scope():
        embedding = ar.nn.Embedding(rows, 16, embeddings_initializer="zeros")
        optimizer = ar.optim.Adagrad(RATE, initial_accumulator_value=ACCUMULATOR, epsilon=1e-12)
    batches = numbers_of(rows)

    @ar.function
    def look_up(numbers: Any) -> Any:
        return ar.ops.mean(embedding(numbers))

    @ar.function
    def step(numbers: Any) -> Any:
        found = embedding(numbers)
        optimizer.minimize(ar.ops.sum(found, axis=(1, 2)), [embedding.anchor])
        return ar.ops.mean(found)

    def seconds(run: Any) -> float:
        for batch in batches:
            strategy.run(run, (batch,))
        start = time.perf_counter()
        for number in range(steps):
            strategy.run(run, (batches[number % BATCHES],))
        return (time.perf_counter() - start) / steps

    looked = seconds(look_up)
    before = sum(server.nbytes for server in strategy._servers)
    updated = seconds(step)
    moved = (sum(server.nbytes for server in strategy._servers) - before) / (steps + BATCHES)
    (mean,) = strategy.run(look_up, (batches[0],)).values
    different = statistics.mean(len(np.unique(each)) for each in batches)
    numbers = batches[0].size
    found = {"lookups_per_second": numbers / looked, "updates_per_second": numbers / updated}
    paper = different * (4 + 64) * 2  # numbers and rows, there and back
    print(json.dumps({**found, "mean": float(mean), "bytes": moved, "bytes_on_paper": paper}))


def numbers_of(rows: int) -> list[np.ndarray]:
    """Return the batches of every contestant."""
    random = np.random.default_rng(0)
    return [random.integers(0, rows, SHAPE).astype(np.int32) for _ in range(BATCHES)]


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
            given: dict[str, Any] = {"sizes": SIZES, "batch": BATCH, "steps": steps}
            found = tensorflow(python, {"ps": 1, "worker": 2}, "train", given)
            print(f"MLP TensorFlow: {found['samples_per_second']:,.0f} samples/s")
        found = launch("ps=1,worker=1", "--worker", "push", str(count), "10")
        print(
            f"push and pull of {count:,}: {found['seconds'] * 1e3:.1f} ms, "
            f"{found['bytes_per_second'] / 1e9:.1f} GB/s, {found['share']:.0%} of memory's"
        )
        tables(python, rows, steps // 5)


def tables(python: Path | None, rows: int, steps: int) -> None:
    """Measure our table, and TensorFlow's if there is its interpreter."""
    found = launch("ps=2,worker=1", "--worker", "table", str(rows), str(steps))
    print(
        f"{rates(rows, found, steps)}, "
        f"{found['bytes'] / found['bytes_on_paper']:.3f} times the bytes on paper"
    )
    if python is not None:
        given = {"rows": rows, "shape": SHAPE, "batches": BATCHES, "steps": steps}
        given |= {"rate": RATE, "accumulator": ACCUMULATOR}
        found = tensorflow(python, {"ps": 2, "worker": 1}, "table", given)
        print(f"TensorFlow's {rates(rows, found, steps)}")


def rates(rows: int, found: dict[str, Any], steps: int) -> str:
    """Describe the speed of a table, after a comparison of its rows with NumPy's.

    Raises:
        SystemExit: They differ.
    """
    weights, sums = np.zeros(rows), np.full(rows, ACCUMULATOR)  # all columns are equal
    batches = numbers_of(rows)
    for number in range(BATCHES + steps):
        different, counts = np.unique(batches[number % BATCHES], return_counts=True)
        gradients = counts / SHAPE[0]
        sums[different] += gradients**2
        weights[different] -= RATE * gradients / np.sqrt(sums[different])
    expected = weights[batches[0]].mean()
    if not np.isclose(found["mean"], expected, rtol=1e-4):
        raise SystemExit(f"rows are {found['mean']} on average, not {expected}: {found}")
    return (
        f"table of {rows:,} x 16: {found['lookups_per_second']:,.0f} lookups/s, "
        f"{found['updates_per_second']:,.0f} lookups with updates/s"
    )


def tensorflow(
    python: Path, tasks: dict[str, int], what: str, given: dict[str, Any]
) -> dict[str, Any]:
    """Run a part of TensorFlow's peer on a cluster of these tasks and a chief."""
    from allreduce.cluster.launcher.cluster_job import free_ports

    jobs = {**tasks, "chief": 1}
    ports = iter(free_ports(sum(jobs.values())))
    cluster = {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in jobs.items()}
    program = ROOT / "benchmarks" / "peers" / "tensorflow_parameter_server.py"
    started: list[subprocess.Popen[str]] = []
    try:
        for job, index in ((job, index) for job, n in jobs.items() for index in range(n)):
            task = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            started.append(
                subprocess.Popen(
                    [str(python), str(program), what, json.dumps(given)],
                    stdout=subprocess.PIPE if job == "chief" else subprocess.DEVNULL,
                    stderr=subprocess.PIPE if job == "chief" else subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, **THREADS, "TF_CONFIG": task, "TF_CPP_MIN_LOG_LEVEL": "3"},
                )
            )
        out, err = started[-1].communicate(timeout=300)
    finally:
        for each in started:
            each.kill()
            each.wait()
    if started[-1].returncode:
        raise SystemExit(f"TensorFlow's chief has failed:\n{err}")
    found: dict[str, Any] = json.loads(out.rpartition("FOUND ")[2])
    return found


if __name__ == "__main__":
    main()
