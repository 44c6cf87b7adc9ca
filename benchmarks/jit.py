"""Compare a JIT for chains of operations with the own tile loops: start-up cost and gain.

    pip install numba numexpr
    python benchmarks/jit.py

Each program takes a step, and computes the chain of `workloads/chain.py` on few numbers: by another
traced step, or by a function that Numba (from its cache) or numexpr has compiled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import reduce
from pathlib import Path

from workloads.chain import LINKS, SIZE

SIGNS = {"multiply": "*", "add": "+", "subtract": "-", "divide": "/"}

BEGIN = """
import sys, time
import numpy as np
import allreduce as ar
ar.function(lambda x: x)(np.ones(16, np.float32))
"""
OURS = """
from workloads import chain
run = ar.function(lambda x: chain.apply(ar.ops, x))
"""
NUMBA = """
import numba
f = np.float32
@numba.njit("void(float32[::1], float32[::1])", cache=True)
def chain(x, out):
    for i in range(x.size):
        out[i] = {expression}
outs = {{}}
def run(x):
    out = outs.setdefault(x.size, np.empty_like(x))
    chain(x, out)
    return out
"""
NUMEXPR = """
import numexpr
numexpr.set_num_threads(1)
f, outs = np.float32, {{}}
names = {names}
def run(x):
    out = outs.setdefault(x.size, np.empty_like(x))
    return numexpr.evaluate({expression!r}, {{"x0": x, **names}}, out=out)
"""
END = """
run(np.ones(16, np.float32))
if len(sys.argv) > 1:
    x, seconds = np.random.default_rng(0).random(int(sys.argv[1]), np.float32), []
    for _ in range(25):
        start = time.perf_counter()
        run(x)
        seconds.append(time.perf_counter() - start)
    print(np.median(seconds))
"""


def programs() -> dict[str, str]:
    """Write a program for each way."""
    by_number = reduce(lambda x, link: f"({x} {SIGNS[link[0]]} f({link[1]}))", LINKS, "x[i]")
    named = reduce(lambda x, each: f"({x} {SIGNS[each[1][0]]} c{each[0]})", enumerate(LINKS), "x0")
    values = ", ".join(f'"c{i}": f({number})' for i, (_, number) in enumerate(LINKS))
    middle = {
        "own tile loops": OURS,
        "Numba": NUMBA.format(expression=by_number),
        "numexpr": NUMEXPR.format(expression=named, names=f"{{{values}}}"),
    }
    return {name: BEGIN + text + END for name, text in middle.items()}


def run(script: Path, processes: int, *arguments: str) -> tuple[float, str]:
    """Run a program so often at once; returns the seconds until the last is over, and its words."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_MAX_THREADS": "1"}
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, str(script), *arguments]
    start = time.perf_counter()
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    said = [each.communicate(timeout=100)[0] for each in started]
    if any(each.returncode for each in started):
        raise SystemExit(f"{script.name} has failed")
    return time.perf_counter() - start, said[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scripts = {name: Path(folder) / f"way{i}.py" for i, name in enumerate(programs())}
        first: dict[str, float] = {}
        for name, text in programs().items():
            scripts[name].write_text(text)
            first[name], _ = run(scripts[name], 1)  # which fills caches
        starts: dict[str, list[float]] = {name: [] for name in scripts}
        chains: dict[str, list[float]] = {name: [] for name in scripts}
        for _ in range(options.rounds):
            for name, script in scripts.items():
                starts[name].append(run(script, options.ranks)[0])
                chains[name].append(float(run(script, 1, str(SIZE))[1]))
    print(f"| | first start, s | {options.ranks} starts at once, s | chain of 10⁷, ms |")
    print("|---|---|---|---|")
    for name in scripts:
        start, chain = (statistics.median(each[name]) for each in (starts, chains))
        print(f"| {name} | {first[name]:.2f} | {start:.2f} | {chain * 1e3:.1f} |")


if __name__ == "__main__":
    main()
