"""Where a rank's time in one collective goes, function by function.

    python benchmarks/sampling.py all_reduce --nbytes 1048576
    python benchmarks/sampling.py all_reduce --nbytes 262144 --ranks 8 --memory empty

Linux's `perf` samples rank 0 by its clock while all ranks repeat the call. The package strips what
it compiles; built for this, functions have names:

    pip install . -C cmake.build-type=RelWithDebInfo \\
      -C cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO="-O3 -DNDEBUG -g1"
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cases import COLLECTIVES, Case
from jobs import run

if TYPE_CHECKING:
    from allreduce.comm import Communicator

# perf's: share, user or kernel, function; with columns of what it has not sampled
_ROW = re.compile(r"\s*([\d.]+)%\s+\[(.)\]\s+(.+?)(?:\s+-)*\s*$")
_NOISE = re.compile(r"allreduce::|avx2::|avx512::|baseline::|\(anonymous namespace\)::")
_SMALLEST_SHARE = 0.01
_BATCH_SECONDS = 0.2  # of calls, between which the ranks agree on whether to go on


def take_part(options: argparse.Namespace) -> None:
    """Repeat the call as one of the ranks; rank 0 is sampled, and reports."""
    import ours

    from allreduce.comm import init

    with init(transport=options.transport) as comm:
        case = Case(options.collective, "float32", comm.size, options.nbytes)
        named = {each.name.replace("comm.", ""): each for each in ours.contestants(comm, case)}
        contestant = named[options.memory]
        contestant.refill(case.source(comm.rank))
        calls = _batch(comm, contestant.call)
        if comm.rank:
            while _agreed(comm, True):
                _repeat(contestant.call, calls)
            return
        with tempfile.TemporaryDirectory() as folder:
            _sampled(comm, contestant.call, calls, Path(folder) / "perf.data", options.seconds)


def _batch(comm: Communicator, call: Callable[[], object]) -> int:
    """Return how many calls take `_BATCH_SECONDS`, the same on all ranks."""
    began = time.perf_counter()
    _repeat(call, 10)
    each = (time.perf_counter() - began) / 10
    return int(comm.broadcast_object(max(1, int(_BATCH_SECONDS / each))))


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _agreed(comm: Communicator, wanted: bool) -> bool:
    return bool(comm.broadcast_object(wanted))


def _sampled(
    comm: Communicator, call: Callable[[], object], calls: int, data: Path, seconds: float
) -> None:
    _agreed(comm, True)
    _repeat(call, calls)  # the first reach memory that nobody has touched
    record = ("perf", "record", "-q", "-e", "cpu-clock", "-F", "4000", "-o", str(data))
    sampler = subprocess.Popen([*record, "-p", str(os.getpid()), "--", "sleep", str(seconds)])
    began, made = time.perf_counter(), 0
    while sampler.poll() is None:
        _agreed(comm, True)
        _repeat(call, calls)
        made += calls
    each = (time.perf_counter() - began) / made
    _agreed(comm, False)
    _report(each, data)


def _report(each: float, data: Path) -> None:
    """Print what a call's microseconds went into."""
    report = subprocess.run(
        ["perf", "report", "-i", data, "--stdio", "--no-children", "--sort", "symbol"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    print(f"{each * 1e6:.1f} us a call; of these")
    for share, name in shares(report):
        print(f"{share * each * 1e6:9.1f} us {share:4.0%}  {name}")


def shares(report: str) -> list[tuple[float, str]]:
    """Read the functions of 1 % and more, with their shares, in what perf has reported."""
    found = []
    for row in filter(None, map(_ROW.match, report.splitlines())):
        name = _NOISE.sub("", row[3]) + (" (kernel)" if row[2] == "k" else "")
        found.append((float(row[1]) / 100, name))
    return [(share, name) for share, name in found if share >= _SMALLEST_SHARE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="of a rank's input")
    parser.add_argument("--memory", choices=("ordinary", "empty"), default="ordinary")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--transport", default="shared")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        take_part(options)
        return
    if shutil.which("perf") is None:
        sys.exit("sampling needs Linux's perf (the package linux-perf on Debian)")
    command = [sys.executable, "-m", "allreduce.run", "-n", str(options.ranks)]
    own = [str(Path(__file__).resolve()), *sys.argv[1:], "--inside"]
    print(run([[*command, *own]], environ={}, cwd=Path.cwd(), deadline=options.seconds + 60))


if __name__ == "__main__":
    main()
